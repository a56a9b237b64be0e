# Run without any cloud: `terraform test`.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_region" {
    defaults = { name = "us-west-2" }
  }
  mock_data "aws_efs_file_system" {
    defaults = { arn = "arn:aws:elasticfilesystem:us-west-2:123456789012:file-system/fs-0123456789abcdef0" }
  }
  mock_resource "aws_efs_file_system" {
    defaults = { arn = "arn:aws:elasticfilesystem:us-west-2:123456789012:file-system/fs-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/demo-node" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/demo-controller" }
  }
  mock_resource "aws_sqs_queue" {
    defaults = { arn = "arn:aws:sqs:us-west-2:123456789012:demo-interruptions" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0" }
  }
}

variables {
  cluster = "demo"
  region  = "us-west-2"
  zones   = ["us-west-2a", "us-west-2b"]
}

run "one_subnet_and_one_mount_target_a_zone" {
  assert {
    condition     = length(output.base.subnets) == 2
    error_message = "each zone must have one subnet"
  }
  assert {
    condition     = length(module.storage.mount_targets) == 2
    error_message = "each zone must have one mount target"
  }
}

run "nodes_demand_tokens_and_end_when_they_shut_down" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    image_parameter    = "/aws/service/image"
    root_volume_gib    = 100
    log_retention_days = 30
    instance_profile   = "demo-node"
    security_group     = "sg-1"
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required"
    error_message = "IMDSv2 must be required"
  }
  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "a bridged container must not reach the node's credentials"
  }
  assert {
    condition     = aws_launch_template.this.instance_initiated_shutdown_behavior == "terminate"
    error_message = "a node that shuts itself down must not be billed on"
  }
  assert {
    condition     = tobool(aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted)
    error_message = "volumes must be encrypted"
  }
}

run "nothing_is_open_to_the_world" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    cidr = "10.42.0.0/16"
  }

  assert {
    condition = alltrue([
      for rule in [
        aws_vpc_security_group_ingress_rule.node_from_node,
        aws_vpc_security_group_ingress_rule.etcd_clients,
        aws_vpc_security_group_ingress_rule.etcd_peers,
        aws_vpc_security_group_ingress_rule.storage_from_node,
      ] : rule.cidr_ipv4 == null && rule.cidr_ipv6 == null
    ])
    error_message = "ingress must come from security groups only"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.etcd_clients.from_port == 2379 && aws_vpc_security_group_ingress_rule.storage_from_node.from_port == 2049
    error_message = "etcd and NFS must be reachable from the nodes"
  }
}

run "a_file_system_of_the_users_is_taken_and_not_made" {
  variables {
    file_system_id = "fs-0123456789abcdef0"
  }

  assert {
    condition     = output.base.file_system == "fs-0123456789abcdef0" && output.base.file_system_is_yours
    error_message = "the given file system must be used"
  }
  assert {
    condition     = length(module.storage.mount_targets) == 0
    error_message = "nothing may be added to the user's file system but an access point"
  }
}

run "a_zone_named_twice_is_refused" {
  command         = plan
  expect_failures = [var.zones]

  variables {
    zones = ["us-west-2a", "us-west-2a"]
  }
}

run "a_bad_name_is_refused" {
  command         = plan
  expect_failures = [var.cluster]

  variables {
    cluster = "Demo Cluster"
  }
}
