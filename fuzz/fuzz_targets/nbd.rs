#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_serve::nbd::fuzz::fuzz(bytes));
