//! Bytes produced by a C program from the structures of `include/uapi/linux/ublk_cmd.h`, on x86-64.

use super::control::{ANY_DEVICE, NO_QUEUE};
use super::queue::{
    IO_BYTES_MAX, RES_ABORT, descriptor_table_bytes, descriptor_table_offset, request_data_offset,
};
use super::{
    ControlCommand, ControlOp, DeviceInfo, DeviceState, Discard, DiskAttributes, Features,
    IoDescriptor, IoFlags, IoOp, Parameters, QueueCommand, QueueOp,
};

/// Decodes hexadecimal digits; the rest is zero.
fn bytes_from_hex<const N: usize>(digits: &str) -> [u8; N] {
    let digits: String = digits.split_whitespace().collect();
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate().take(digits.len() / 2) {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap();
    }
    bytes
}

#[test]
fn ublk_command_codes_equal_the_kernels() {
    let control = ControlOp::ALL.map(ControlOp::code);
    let expected = [
        0x8020_7502,
        0xc020_7504,
        0xc020_7505,
        0xc020_7506,
        0xc020_7507,
        0xc020_7508,
        0x8020_7509,
        0xc020_7510,
        0xc020_7511,
        0x8020_7513,
        0x8020_7514,
    ];
    assert_eq!(control, expected);
    assert_eq!(QueueOp::Fetch.code(), 0xc010_7520);
    assert_eq!(QueueOp::CommitAndFetch.code(), 0xc010_7521);
    assert_eq!(
        (QueueOp::RegisterBuffer.code(), QueueOp::UnregisterBuffer.code()),
        (0xc010_7523, 0xc010_7524)
    );
}

#[test]
fn ublk_control_command_has_the_kernel_layout() {
    let command = ControlCommand {
        device: 7,
        queue: NO_QUEUE,
        len_bytes: 64,
        address: 0x1122_3344_5566_7788,
        data: 4321,
    };
    assert_eq!(command.to_bytes(), bytes_from_hex("07000000ffff4000 8877665544332211 e110"));
    assert_eq!(ControlCommand::for_device(ANY_DEVICE).to_bytes(), bytes_from_hex("ffffffffffff"));
}

#[test]
fn ublk_device_info_has_the_kernel_layout() {
    let info = DeviceInfo {
        queues: 3,
        depth: 128,
        state: DeviceState::Live,
        io_bytes_max: 512 << 10,
        device: 7,
        process: 4321,
        features: Features(0xd8),
        signature: 0x0102_0304_0506_0708,
        owner_uid: 0,
        owner_gid: 5,
    };
    let exact = bytes_from_hex(
        "0300800001000000 0000080007000000 e110000000000000 d800000000000000 0807060504030201
         0000000005000000",
    );
    assert_eq!(info.to_bytes(), exact);
    assert_eq!(DeviceInfo::from_bytes(&exact), info);
    let ours = Features::RECOVERY.union(Features::RECOVERY_REISSUE).union(Features::USER_COPY);
    assert_eq!(info.features, ours.union(Features::IOCTL_ENCODE));
    assert_eq!(Features(0x81).names().collect::<Vec<_>>(), ["zero copy", "user copy"]);
    let leased = Features(0x4000).names();
    assert_eq!(leased.collect::<Vec<_>>(), ["zero copy by any thread"]);
}

#[test]
fn unknown_ublk_device_states_are_preserved() {
    for number in [0_u16, 1, 2, 3, 999] {
        let mut given = [0; DeviceInfo::BYTES];
        given[4..6].copy_from_slice(&number.to_ne_bytes());
        let info = DeviceInfo::from_bytes(&given);
        assert_eq!(info.to_bytes(), given, "{number}");
        assert_eq!(matches!(info.state, DeviceState::Other(_)), number > 2);
    }
}

#[test]
fn ublk_parameters_have_the_kernel_layout() {
    let parameters = Parameters {
        attributes: DiskAttributes::VOLATILE_CACHE.union(DiskAttributes::FUA),
        block_shift: 9,
        physical_shift: 12,
        sectors_max: 1024,
        sectors: 2_097_152,
        discard: Some(Discard {
            granularity: 4096,
            discard_sectors_max: 2_097_152,
            zero_sectors_max: 1_048_576,
        }),
        memory_alignment: None,
    };
    let exact = bytes_from_hex(
        "3c00000003000000 0c000000090c0c0c 0004000000000000 0000200000000000 0000000000000000
         0000000000100000 0000200000001000 01000000",
    );
    assert_eq!(parameters.to_bytes(), exact);
    assert_eq!(Parameters::from_bytes(&exact), Some(parameters));
    let plain = Parameters { discard: None, ..parameters };
    assert_eq!(Parameters::from_bytes(&plain.to_bytes()), Some(plain));
    assert_eq!(Parameters::from_bytes(&Parameters::query_buffer()), None, "it says nothing yet");
    assert_eq!(Parameters::query_buffer(), bytes_from_hex("74"));
    let aligned = Parameters { memory_alignment: Some(512), ..plain };
    let exact: [u8; Parameters::BYTES] = aligned.to_bytes();
    assert_eq!((exact[..8].to_vec(), exact[108..116].to_vec()), aligned_bytes());
    assert_eq!(Parameters::from_bytes(&exact), Some(aligned));
}

/// Length and types of parameters with an alignment of 512 bytes, and `dma` of them.
fn aligned_bytes() -> (Vec<u8>, Vec<u8>) {
    (bytes_from_hex::<8>("7400000011000000").to_vec(), bytes_from_hex::<8>("ff010000").to_vec())
}

#[test]
fn ublk_queue_command_has_the_kernel_layout() {
    let command = QueueCommand { queue: 2, tag: 0x1ff, result: -5, buffer: 0 };
    assert_eq!(command.to_bytes(), bytes_from_hex("0200ff01fbffffff"));
    let register = QueueCommand { queue: 2, tag: 3, result: 0, buffer: 0x102 };
    assert_eq!(register.to_bytes(), bytes_from_hex("0200030000000000 0201"));
    assert_eq!(RES_ABORT, -19, "ENODEV of asm-generic/errno-base.h");
}

#[test]
fn ublk_io_descriptor_has_the_kernel_layout() {
    let exact = bytes_from_hex("01200000 08000000 9a78563412000000");
    let descriptor = IoDescriptor::from_bytes(&exact);
    let expected = IoDescriptor {
        op: IoOp::Write,
        flags: IoFlags::FUA,
        sectors: 8,
        first_sector: 0x12_3456_789a,
    };
    assert_eq!(descriptor, expected);
    assert_eq!(descriptor.to_bytes(), exact);
}

#[test]
fn every_ublk_operation_number_is_decoded() {
    for number in 0..=255_u8 {
        let mut given = [0xff; IoDescriptor::BYTES];
        given[0] = number;
        let descriptor = IoDescriptor::from_bytes(&given);
        assert_eq!(descriptor.op.number(), number);
        let is_known = matches!(number, 0..=3 | 5);
        assert_eq!(matches!(descriptor.op, IoOp::Other(_)), !is_known, "{number}");
    }
}

#[test]
fn ublk_device_offsets_equal_the_kernels() {
    assert_eq!(descriptor_table_bytes(128, 4096), 4096, "3072 in whole pages");
    assert_eq!(descriptor_table_bytes(171, 4096), 8192);
    assert_eq!(
        (descriptor_table_offset(0, 4096), descriptor_table_offset(3, 4096)),
        (0, 3 * 98_304)
    );
    assert_eq!(descriptor_table_offset(1, 65_536), 131_072);
    assert_eq!(request_data_offset(0, 0, 0), 0x8000_0000);
    assert_eq!(request_data_offset(1, 2, 512), 0x8000_0000 + (1 << 41) + (2 << 25) + 512);
    assert_eq!(
        request_data_offset(0, 0, IO_BYTES_MAX),
        request_data_offset(0, 0, 0),
        "never another request's"
    );
}
