"""Remote ranks: the gateway beside the driver, the relays beside workers, and the ZeroMQ links."""
