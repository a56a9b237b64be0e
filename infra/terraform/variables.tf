variable "cluster" {
  description = "Name of the cluster: prefix of every resource and value of the tag elastic:cluster."
  type        = string

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$", var.cluster))
    error_message = "cluster must be 1 to 32 lower-case letters, digits and dashes, starting with a letter and not ending with a dash."
  }
}

variable "region" {
  description = "AWS region of everything, such as us-west-2."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must look like us-west-2."
  }
}

variable "zones" {
  description = "Availability zones to use, one subnet and one mount target each. A generation of nodes lives in one of them."
  type        = list(string)

  validation {
    condition     = length(var.zones) > 0 && length(var.zones) == length(distinct(var.zones))
    error_message = "zones must name at least one zone and none twice: a file system takes one mount target a zone."
  }
}

variable "network_cidr" {
  description = "Address range of the VPC; split into one /20 a zone."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = can(cidrhost(var.network_cidr, 0)) && try(tonumber(split("/", var.network_cidr)[1]), 32) <= 16
    error_message = "network_cidr must be an IPv4 range of /16 or larger."
  }
}

variable "file_system_id" {
  description = "An EFS file system of your own to use instead of a new one. It is never changed or deleted."
  type        = string
  default     = null

  validation {
    condition     = var.file_system_id == null || can(regex("^fs-[0-9a-f]+$", var.file_system_id))
    error_message = "file_system_id must look like fs-0123456789abcdef0."
  }
}

variable "image_parameter" {
  description = "Public SSM parameter that names the machine image of the nodes."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

variable "root_volume_gib" {
  description = "Size of each node's encrypted root volume, in GiB."
  type        = number
  default     = 100

  validation {
    condition     = var.root_volume_gib >= 20 && var.root_volume_gib <= 16384
    error_message = "root_volume_gib must lie between 20 and 16384."
  }
}

variable "log_retention_days" {
  description = "Days that agents' logs are kept."
  type        = number
  default     = 30
}

variable "expire_objects" {
  description = "Whether a lifecycle rule ends incomplete uploads and old versions in the bucket (costs a minute of every apply)."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Further tags of every resource."
  type        = map(string)
  default     = {}
}

variable "emulated" {
  description = "True when AWS_ENDPOINT_URL points at the emulator."
  type        = bool
  default     = false
}
