#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tenmil_nvme_controller::controller::fuzz_admin_commands(bytes));
