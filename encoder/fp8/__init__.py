"""8-bit GEMMs of the fused towers, and their validation against float32."""
