#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_volume::fuzz::fuzz_stream(bytes));
