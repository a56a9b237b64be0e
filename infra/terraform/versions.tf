terraform {
  required_version = ">= 1.9"

  # The flow gives the path: `init -backend-config=path=…`. A team takes S3 with
  # `use_lockfile = true` here instead.
  backend "local" {}

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  # An emulator answers calls that it lacks with HTTP 500, which the provider's
  # default of 25 retries would turn into minutes of silence.
  max_retries                 = var.emulated ? 2 : 25
  s3_use_path_style           = var.emulated
  skip_credentials_validation = var.emulated
  skip_metadata_api_check     = var.emulated
  skip_requesting_account_id  = false

  default_tags {
    tags = merge(var.tags, { "elastic:cluster" = var.cluster, "elastic:owner" = "terraform" })
  }
}
