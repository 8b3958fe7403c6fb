#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_nvme_controller::fuzz::run_memory_transport(bytes));
