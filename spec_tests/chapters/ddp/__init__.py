"""Chapter ddp: replicas whose gradients are averaged."""
