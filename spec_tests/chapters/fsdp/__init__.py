"""Chapter fsdp: parameters, gradients and optimizer state in shards."""
