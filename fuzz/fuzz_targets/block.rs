#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_block::fuzz::fuzz_uri(bytes));
