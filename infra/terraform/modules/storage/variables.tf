variable "cluster" {
  description = "Prefix of the names."
  type        = string
}

variable "subnets" {
  description = "Subnet id by zone; each gets a mount target."
  type        = map(string)
}

variable "security_group" {
  description = "Security group of the mount targets."
  type        = string
}

variable "file_system_id" {
  description = "The user's own file system, or null for a new one."
  type        = string
}

variable "expire_objects" {
  description = "Whether old versions and incomplete uploads end."
  type        = bool
}

variable "force_destroy" {
  description = "Whether destroy empties the bucket: only ever in the emulator."
  type        = bool
}
