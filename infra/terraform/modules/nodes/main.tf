# What every node is launched from. A job adds a version with its user data,
# because CreateFleet cannot override user data.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

resource "aws_ecr_repository" "this" {
  name                 = var.cluster
  image_tag_mutability = "IMMUTABLE"

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_cloudwatch_log_group" "this" {
  name              = "/elastic/${var.cluster}"
  retention_in_days = var.log_retention_days
}

resource "aws_launch_template" "this" {
  name                                 = var.cluster
  image_id                             = "resolve:ssm:${var.image_parameter}"
  instance_initiated_shutdown_behavior = "terminate" # the dead-man timer ends a node by shutting it down
  vpc_security_group_ids               = [var.security_group]

  iam_instance_profile {
    name = var.instance_profile
  }

  # The agent has the host's network, so that one hop is enough, and a bridged
  # container cannot take the node's role.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_size           = var.root_volume_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
}
