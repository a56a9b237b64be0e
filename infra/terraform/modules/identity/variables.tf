variable "cluster" {
  description = "Prefix of the names, and the tag's value that ends may act on."
  type        = string
}

variable "region" {
  description = "Region of the parameters."
  type        = string
}

variable "bucket_arn" {
  description = "ARN of the bucket."
  type        = string
}

variable "file_system_arn" {
  description = "ARN of the file system."
  type        = string
}

variable "access_point_arn" {
  description = "ARN of the only access point that nodes may mount."
  type        = string
}

variable "repository_arn" {
  description = "ARN of the image repository."
  type        = string
}

variable "log_group_arn" {
  description = "ARN of the log group."
  type        = string
}

variable "queue_arn" {
  description = "ARN of the interruption queue."
  type        = string
}
