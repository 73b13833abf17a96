"""What is asked of qemu-img."""
