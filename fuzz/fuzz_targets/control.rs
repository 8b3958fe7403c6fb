#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_rpc::fuzz::fuzz_api_request(bytes));
