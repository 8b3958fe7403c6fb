#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_target::tcp::fuzz::fuzz(bytes));
