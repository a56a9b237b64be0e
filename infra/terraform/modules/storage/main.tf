# EFS holds checkpoints and small shared state; data sets belong in the bucket,
# for reads from EFS are billed by the byte.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

locals {
  own         = var.file_system_id == null
  file_system = local.own ? aws_efs_file_system.this[0].id : var.file_system_id
}

resource "aws_efs_file_system" "this" {
  count = local.own ? 1 : 0

  creation_token  = var.cluster
  encrypted       = true
  throughput_mode = "elastic"
  tags            = { Name = var.cluster }

  lifecycle_policy {
    transition_to_ia = "AFTER_30_DAYS"
  }
}

data "aws_efs_file_system" "given" {
  count = local.own ? 0 : 1

  file_system_id = var.file_system_id
}

# Only encrypted connections, and only through an access point.
data "aws_iam_policy_document" "mount" {
  statement {
    sid       = "DenyPlaintext"
    effect    = "Deny"
    actions   = ["*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_efs_file_system_policy" "this" {
  count = local.own ? 1 : 0

  file_system_id = local.file_system
  policy         = data.aws_iam_policy_document.mount.json
}

resource "aws_efs_mount_target" "zone" {
  for_each = local.own ? var.subnets : {}

  file_system_id  = local.file_system
  subnet_id       = each.value
  security_groups = [var.security_group]
}

resource "aws_efs_access_point" "this" {
  file_system_id = local.file_system
  tags           = { Name = var.cluster }

  posix_user {
    uid = 1000
    gid = 1000
  }

  root_directory {
    path = "/elastic/${var.cluster}"

    creation_info {
      owner_uid   = 1000
      owner_gid   = 1000
      permissions = "0750"
    }
  }
}

resource "aws_s3_bucket" "this" {
  bucket_prefix = "${var.cluster}-"
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "this" {
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "aws:kms"
    }
    bucket_key_enabled = true
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  count  = var.expire_objects ? 1 : 0
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "expire"
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }

    noncurrent_version_expiration {
      noncurrent_days = 30
    }
  }
}
