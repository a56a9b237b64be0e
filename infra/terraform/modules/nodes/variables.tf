variable "cluster" {
  description = "Name of template, repository and log group."
  type        = string
}

variable "image_parameter" {
  description = "SSM parameter of the machine image."
  type        = string
}

variable "root_volume_gib" {
  description = "Root volume in GiB."
  type        = number
}

variable "log_retention_days" {
  description = "Days that logs are kept."
  type        = number
}

variable "instance_profile" {
  description = "Name of the nodes' instance profile."
  type        = string
}

variable "security_group" {
  description = "Security group of training nodes."
  type        = string
}
