#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_serve::tcp::fuzz::fuzz_nvme_tcp_authentication(bytes));
