#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_vhost_user::fuzz::fuzz_server(bytes));
