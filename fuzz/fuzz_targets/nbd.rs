#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_serve::nbd::fuzz::fuzz_nbd_connection(bytes));
