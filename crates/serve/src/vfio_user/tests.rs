//! Tests of a device over a Unix socket, with clients that speak the protocol by hand.

mod slow_device;
mod test_client;

mod data_transfer;
mod disconnect;
mod dma_mappings;
mod latency;
mod rust_vmm_client;
