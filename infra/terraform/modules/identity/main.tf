# Two identities: a node may touch its own cluster's data and nothing of EC2; the
# flow may launch and end nodes that carry the cluster's tag.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

data "aws_caller_identity" "this" {}

data "aws_iam_policy_document" "ec2" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "node" {
  statement {
    sid       = "MountTheFileSystem"
    actions   = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    resources = [var.file_system_arn]

    condition {
      test     = "StringEquals"
      variable = "elasticfilesystem:AccessPointArn"
      values   = [var.access_point_arn]
    }
  }

  statement {
    sid       = "ReadAndWriteTheBucket"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
    resources = ["${var.bucket_arn}/*"]
  }

  statement {
    sid       = "ListTheBucket"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
  }

  statement {
    sid       = "WriteLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${var.log_group_arn}:*"]
  }

  statement {
    sid       = "PullImages"
    actions   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
    resources = [var.repository_arn]
  }

  statement {
    sid       = "LogInToTheRegistry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"] # the call takes no resource
  }

  statement {
    sid       = "ReadItsJobDocument"
    actions   = ["ssm:GetParameter"]
    resources = ["arn:aws:ssm:${var.region}:${data.aws_caller_identity.this.account_id}:parameter/elastic/${var.cluster}/*"]
  }
}

resource "aws_iam_role" "node" {
  name               = "${var.cluster}-node"
  assume_role_policy = data.aws_iam_policy_document.ec2.json
}

resource "aws_iam_role_policy" "node" {
  name   = "node"
  role   = aws_iam_role.node.id
  policy = data.aws_iam_policy_document.node.json
}

resource "aws_iam_instance_profile" "node" {
  name = "${var.cluster}-node"
  role = aws_iam_role.node.name
}

data "aws_iam_policy_document" "controller" {
  statement {
    sid = "SeeEverythingItDecidesOn"
    actions = [
      "ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeSpotPriceHistory", "ec2:DescribeFleets",
      "ec2:DescribeVolumes", "ec2:DescribeImages", "ec2:DescribeSubnets", "ec2:DescribeSecurityGroups",
      "ec2:DescribeSecurityGroupRules", "ec2:DescribeLaunchTemplates", "ec2:DescribeLaunchTemplateVersions",
      "elasticfilesystem:DescribeFileSystems", "elasticfilesystem:DescribeMountTargets",
      "elasticfilesystem:DescribeMountTargetSecurityGroups",
      "elasticfilesystem:DescribeAccessPoints",
    ]
    resources = ["*"] # describe calls take no resource
  }

  statement {
    sid       = "HearWhyAMachineEndedItself"
    actions   = ["ec2:GetConsoleOutput"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/elastic:cluster"
      values   = [var.cluster]
    }
  }

  statement {
    sid       = "Launch"
    actions   = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = ["*"]
  }

  statement {
    sid       = "HandNodesTheirStartScript"
    actions   = ["ec2:CreateLaunchTemplateVersion", "ec2:DeleteLaunchTemplateVersions"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/elastic:cluster"
      values   = [var.cluster]
    }
  }

  # The flow runs with the file system mounted, and reads what nodes wrote.
  statement {
    sid       = "MountTheFileSystem"
    actions   = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    resources = [var.file_system_arn]

    condition {
      test     = "StringEquals"
      variable = "elasticfilesystem:AccessPointArn"
      values   = [var.access_point_arn]
    }
  }

  statement {
    sid       = "TagOnlyWhileCreating"
    actions   = ["ec2:CreateTags"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["CreateFleet", "RunInstances"]
    }
  }

  statement {
    sid       = "EndNodesOfThisCluster"
    actions   = ["ec2:TerminateInstances"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/elastic:cluster"
      values   = [var.cluster]
    }
  }

  statement {
    sid       = "HandTheNodesTheirRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.node.arn]
  }

  # Where a file system of yours lacks a mount target.
  statement {
    sid       = "AddMountTargets"
    actions   = ["elasticfilesystem:CreateMountTarget"]
    resources = [var.file_system_arn]
  }

  statement {
    sid       = "AddTheirInterfaces"
    actions   = ["ec2:CreateNetworkInterface", "ec2:DescribeNetworkInterfaces"]
    resources = ["*"] # EFS makes them on the caller's behalf
  }

  statement {
    sid       = "ReadNotices"
    actions   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueUrl"]
    resources = [var.queue_arn]
  }

  statement {
    sid       = "WriteJobDocuments"
    actions   = ["ssm:PutParameter", "ssm:DeleteParameter", "ssm:GetParameter"]
    resources = ["arn:aws:ssm:${var.region}:${data.aws_caller_identity.this.account_id}:parameter/elastic/${var.cluster}/*"]
  }

  statement {
    sid       = "ResolveImages"
    actions   = ["ssm:GetParameter"]
    resources = ["arn:aws:ssm:${var.region}::parameter/aws/service/*"]
  }
}

resource "aws_iam_policy" "controller" {
  name        = "${var.cluster}-controller"
  description = "What the elastic-train flow may do in cluster ${var.cluster}"
  policy      = data.aws_iam_policy_document.controller.json
}
