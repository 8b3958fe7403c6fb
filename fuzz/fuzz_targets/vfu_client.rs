#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_vfio_user::fuzz::fuzz_client(bytes));
