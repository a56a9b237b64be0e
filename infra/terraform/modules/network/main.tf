# Nodes have public addresses to reach S3, ECR and SSM without a NAT gateway's
# price, and no ingress from outside at all: people come in by Session Manager.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

locals {
  zones = { for index, zone in var.zones : zone => index }
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_hostnames = true
  tags                 = { Name = var.cluster }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.cluster }
}

resource "aws_subnet" "zone" {
  for_each = local.zones

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 20 - tonumber(split("/", var.cidr)[1]), each.value)
  map_public_ip_on_launch = true
  tags                    = { Name = "${var.cluster}-${each.key}" }
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.cluster }
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "zone" {
  for_each = aws_subnet.zone

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id          = aws_vpc.this.id
  service_name    = "com.amazonaws.${var.region}.s3"
  route_table_ids = [aws_route_table.public.id]
  tags            = { Name = "${var.cluster}-s3" }
}

resource "aws_security_group" "node" {
  name        = "${var.cluster}-node"
  description = "Training nodes: everything among themselves, nothing from outside"
  vpc_id      = aws_vpc.this.id
}

resource "aws_security_group" "etcd" {
  name        = "${var.cluster}-etcd"
  description = "The etcd node: clients are the training nodes"
  vpc_id      = aws_vpc.this.id
}

resource "aws_security_group" "storage" {
  name        = "${var.cluster}-storage"
  description = "EFS mount targets: NFS from the training nodes and etcd"
  vpc_id      = aws_vpc.this.id
}

resource "aws_vpc_security_group_ingress_rule" "node_from_node" {
  security_group_id            = aws_security_group.node.id
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
  description                  = "workers and agents among themselves"
}

resource "aws_vpc_security_group_ingress_rule" "etcd_clients" {
  security_group_id            = aws_security_group.etcd.id
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "tcp"
  from_port                    = 2379
  to_port                      = 2379
  description                  = "etcd clients"
}

resource "aws_vpc_security_group_ingress_rule" "etcd_peers" {
  security_group_id            = aws_security_group.etcd.id
  referenced_security_group_id = aws_security_group.etcd.id
  ip_protocol                  = "tcp"
  from_port                    = 2380
  to_port                      = 2380
  description                  = "etcd peers"
}

resource "aws_vpc_security_group_ingress_rule" "storage_from_node" {
  security_group_id            = aws_security_group.storage.id
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
  description                  = "NFS"
}

# etcd keeps its data and finds its certificates there.
resource "aws_vpc_security_group_ingress_rule" "storage_from_etcd" {
  security_group_id            = aws_security_group.storage.id
  referenced_security_group_id = aws_security_group.etcd.id
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
  description                  = "NFS"
}

resource "aws_vpc_security_group_egress_rule" "out" {
  for_each = { node = aws_security_group.node.id, etcd = aws_security_group.etcd.id }

  security_group_id = each.value
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  description       = "images, data, logs"
}
