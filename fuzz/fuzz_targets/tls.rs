#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_tls::fuzz::fuzz_tls(bytes));
