# Spot interruption and rebalance notices of the whole account reach one queue;
# the flow reads it to launch the replacement while the node still has two minutes.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

data "aws_caller_identity" "this" {}
data "aws_region" "this" {}

locals {
  name  = "${var.cluster}-interruptions"
  queue = "arn:aws:sqs:${data.aws_region.this.name}:${data.aws_caller_identity.this.account_id}:${local.name}"
  details = {
    interruption = "EC2 Spot Instance Interruption Warning"
    rebalance    = "EC2 Instance Rebalance Recommendation"
    state        = "EC2 Instance State-change Notification"
  }
}

data "aws_iam_policy_document" "queue" {
  statement {
    actions   = ["sqs:SendMessage"]
    resources = [local.queue]

    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }

    condition {
      test     = "ArnLike"
      variable = "aws:SourceArn"
      values   = ["arn:aws:events:${data.aws_region.this.name}:${data.aws_caller_identity.this.account_id}:rule/${var.cluster}-*"]
    }
  }
}

# The policy is inline: a separate resource waits a hard-coded 25 seconds.
resource "aws_sqs_queue" "this" {
  name                      = local.name
  message_retention_seconds = 600
  sqs_managed_sse_enabled   = true
  policy                    = data.aws_iam_policy_document.queue.json
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.details

  name          = "${var.cluster}-${each.key}"
  description   = each.value
  event_pattern = jsonencode({ source = ["aws.ec2"], "detail-type" = [each.value] })
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = aws_cloudwatch_event_rule.this

  rule = each.value.name
  arn  = aws_sqs_queue.this.arn
}
