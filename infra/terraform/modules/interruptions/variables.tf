variable "cluster" {
  description = "Prefix of the names."
  type        = string
}
