//! Rejected messages, field by field, with the reported text.

use super::messages::{ServerFixture, encode_message, u32_payload, u64_payload};

/// Connection with all protocol features negotiated, and queue 0 running.
fn running_server() -> ServerFixture {
    let mut pair = ServerFixture::new();
    for (bytes, files) in [
        (
            encode_message(
                16,
                1,
                &u64_payload(&[1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15]),
            ),
            vec![],
        ),
        (encode_message(8, 1, &u32_payload(&[0, 128])), vec![]),
        (
            encode_message(
                9,
                1,
                &[u32_payload(&[0, 0]), u64_payload(&[0x4000, 0x6000, 0x5000, 0])].concat(),
            ),
            vec![],
        ),
        (encode_message(12, 1, &u64_payload(&[0])), vec![1]),
    ] {
        pair.send(&bytes, &files, usize::MAX).unwrap();
    }
    assert!(pair.log[0].starts_with("start 0 "));
    pair
}

fn vring_addresses_payload(queue: u32, flags: u32, addresses: [u64; 3]) -> Vec<u8> {
    [u32_payload(&[queue, flags]), u64_payload(&addresses), u64_payload(&[0])].concat()
}

fn inflight_payload(len: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    let tail = [queues, size].map(u16::to_le_bytes).concat();
    [u64_payload(&[len, offset]), tail].concat()
}

fn memory_region_payload(guest: u64, len: u64, user: u64, offset: u64) -> Vec<u8> {
    u64_payload(&[guest, len, user, offset])
}

/// Code, payload, number of descriptors, and the expected text.
fn invalid_messages() -> Vec<(u32, Vec<u8>, usize, &'static str)> {
    let max = u64::MAX;
    let two = [
        u32_payload(&[2, 0]),
        memory_region_payload(0, 0x1000, 0, 0),
        memory_region_payload(0x1000, 0x1000, 0x1000, 0),
    ]
    .concat();
    vec![
        (
            2,
            u64_payload(&[1 << 33]),
            0,
            "features is 0x200000000, expected no more than was offered",
        ),
        (2, u64_payload(&[1 << 32]), 0, "expected the same while queues run"),
        (2, u64_payload(&[0]), 1, "SET_FEATURES: 1 descriptors, expected 0"),
        (16, u64_payload(&[1 << 1]), 0, "features is 0x2, expected no more than was offered"),
        (8, u32_payload(&[0, 64]), 0, "queue is 0x0, expected one that does not run"),
        (8, u32_payload(&[2, 64]), 0, "queue is 0x2, expected one of those that there are"),
        (8, u32_payload(&[1, 0]), 0, "num is 0x0, expected a power of two up to 1024"),
        (8, u32_payload(&[1, 100]), 0, "num is 0x64, expected a power of two"),
        (8, u32_payload(&[1, 2048]), 0, "num is 0x800, expected a power of two up to 1024"),
        (10, u32_payload(&[1, 0x1_0000]), 0, "num is 0x10000, expected an index of 16 bits"),
        (10, u32_payload(&[0, 0]), 0, "expected one that does not run"),
        (
            9,
            vring_addresses_payload(1, 1, [0; 3]),
            0,
            "flags is 0x1, expected 0: nothing is logged",
        ),
        (
            9,
            vring_addresses_payload(1, 0, [8, 0, 0]),
            0,
            "descriptor table is 0x8, expected a multiple of 16",
        ),
        (
            9,
            vring_addresses_payload(1, 0, [0, 2, 0]),
            0,
            "used ring is 0x2, expected a multiple of 4",
        ),
        (
            9,
            vring_addresses_payload(1, 0, [0, 0, 1]),
            0,
            "available ring is 0x1, expected a multiple of 2",
        ),
        (12, u64_payload(&[0]), 1, "payload is 0x0, expected a queue that does not run"),
        (12, u64_payload(&[1]), 0, "SET_VRING_KICK: 0 descriptors, expected 1"),
        (12, u64_payload(&[0x101]), 1, "SET_VRING_KICK: 1 descriptors, expected 0"),
        (12, u64_payload(&[0x201]), 1, "payload is 0x201, expected a queue, and bit 8"),
        (13, u64_payload(&[9]), 1, "queue is 0x9, expected one of those that there are"),
        (14, u64_payload(&[1]), 2, "SET_VRING_ERR: 2 descriptors, expected 0 to 1"),
        (18, u32_payload(&[0, 2]), 0, "num is 0x2, expected 0 or 1"),
        (18, u32_payload(&[7, 1]), 0, "queue is 0x7, expected one of those that there are"),
        (5, u32_payload(&[9, 0]), 0, "count is 0x9, expected as many stretches as follow"),
        (5, u32_payload(&[1, 0]), 1, "count is 0x1, expected as many stretches as follow"),
        (5, two.clone(), 1, "SET_MEM_TABLE: 1 descriptors, expected 2"),
        (5, two, 3, "SET_MEM_TABLE: 3 descriptors, expected 2"),
        (
            5,
            [u32_payload(&[1, 0]), memory_region_payload(0, 0, 0, 0)].concat(),
            1,
            "size is 0x0, expected some memory",
        ),
        (
            5,
            [u32_payload(&[1, 0]), memory_region_payload(max, 2, 0, 0)].concat(),
            1,
            "guest address is 0xffffffffffffffff, expected an end that is an address",
        ),
        (
            5,
            [u32_payload(&[1, 0]), memory_region_payload(0, 2, max, 0)].concat(),
            1,
            "user address is",
        ),
        (
            5,
            [u32_payload(&[1, 0]), memory_region_payload(0, 2, 0, max)].concat(),
            1,
            "file offset is",
        ),
        (
            37,
            [u64_payload(&[0]), memory_region_payload(0, 0, 0, 0)].concat(),
            1,
            "ADD_MEM_REG: size is 0x0",
        ),
        (
            37,
            [u64_payload(&[0]), memory_region_payload(0, 1, 0, 0)].concat(),
            0,
            "ADD_MEM_REG: 0 descriptors, expected 1",
        ),
        (
            38,
            [u64_payload(&[0]), memory_region_payload(0, 1, 0, 0)].concat(),
            2,
            "REM_MEM_REG: 2 descriptors",
        ),
        (25, u32_payload(&[32, 0, 0]), 0, "SET_CONFIG: offset is 0x20, expected nothing"),
        (32, inflight_payload(0x1000, 0, 1, 64), 1, "queues is 0x1, expected none that runs"),
        (32, inflight_payload(0x1000, 0, 0, 64), 1, "queues is 0x0, expected 1 to 256"),
        (32, inflight_payload(0x1000, 0, 1, 1025), 1, "queue size is 0x401, expected 1 to 1024"),
        (32, inflight_payload(0x1000, 0, 1, 0), 1, "queue size is 0x0, expected 1 to 1024"),
        (32, inflight_payload(0x1000, 0, 1, 64), 0, "SET_INFLIGHT_FD: 0 descriptors, expected 1"),
        (21, vec![], 0, "SET_BACKEND_REQ_FD: 0 descriptors, expected 1"),
        (6, u64_payload(&[0, 0]), 1, "message 6: not offered"),
        (99, vec![], 0, "message 99: not offered"),
    ]
}

#[test]
fn invalid_message_is_rejected_and_reported_if_requested() {
    for (code, payload, count, expected) in invalid_messages() {
        let files: Vec<u32> = (0..u32::try_from(count).unwrap()).collect();
        let mut asking = running_server();
        let reported_values =
            asking.send(&encode_message(code, 9, &payload), &files, usize::MAX).unwrap();
        let failed = encode_message(code, 5, &u64_payload(&[1]));
        assert_eq!(reported_values, vec![(failed, None)], "{code} {payload:x?}");
        let why = asking.server.take_rejection().unwrap().to_string();
        assert!(why.contains(expected), "{code}: {why}, expected {expected}");
        assert_eq!(asking.log.len(), 1, "the rejected message causes no action");
        // The connection continues normally.
        assert_eq!(asking.send(&encode_message(17, 1, &[]), &[], usize::MAX).unwrap().len(), 1);
        let mut silent = running_server();
        let over = silent.send(&encode_message(code, 1, &payload), &files, usize::MAX).unwrap_err();
        assert_eq!(over.to_string(), why);
    }
}

#[test]
fn invalid_query_ends_the_connection() {
    for (code, payload, expected) in [
        (11, u32_payload(&[2, 0]), "GET_VRING_BASE: queue is 0x2"),
        (24, u32_payload(&[0, 8, 0]), "GET_CONFIG: size is 0x8, expected as many bytes as follow"),
        (24, u32_payload(&[257, 0, 0]), "GET_CONFIG: offset is 0x101, expected 256 bytes"),
        (24, u32_payload(&[u32::MAX, 1, 0]), "GET_CONFIG: offset is 0xffffffff"),
        (24, [u32_payload(&[200, 57, 0]), vec![0; 57]].concat(), "GET_CONFIG: offset is 0xc8"),
        (
            31,
            inflight_payload(0, 0, 257, 64),
            "GET_INFLIGHT_FD: queues is 0x101, expected 1 to 256",
        ),
        (31, inflight_payload(0, 0, 1, 2000), "GET_INFLIGHT_FD: queue size is 0x7d0"),
    ] {
        let over =
            running_server().send(&encode_message(code, 9, &payload), &[], usize::MAX).unwrap_err();
        assert!(over.to_string().starts_with(expected), "{over}");
    }
}

#[test]
fn invalid_header_ends_the_connection() {
    for (header, expected) in [
        ([1, 0, 0], "GET_FEATURES: flags 0x0, expected version 1"),
        ([1, 2, 0], "GET_FEATURES: flags 0x2, expected version 1"),
        ([1, 5, 0], "GET_FEATURES: flags 0x5, expected version 1 and no reply"),
        ([1, 1, 8], "GET_FEATURES: 8 bytes, expected 0"),
        ([2, 9, 4], "SET_FEATURES: 4 bytes, expected 8"),
        ([5, 1, 265], "SET_MEM_TABLE: 265 bytes, expected 8 to 264"),
        ([24, 1, 300], "GET_CONFIG: 300 bytes, expected 12 to 268"),
        ([32, 9, 19], "SET_INFLIGHT_FD: 19 bytes, expected 20 to 24"),
        ([99, 9, u32::MAX], "message 99: 4294967295 bytes, expected 0 to 512"),
    ] {
        let over = running_server().send(&u32_payload(&header), &[], usize::MAX).unwrap_err();
        assert!(over.to_string().starts_with(expected), "{over}");
    }
}

#[test]
fn inflight_buffer_has_space_for_every_queue() {
    let needed = 2 * u64::from(crate::inflight::stride_bytes(64));
    let of = |len| {
        let mut pair = ServerFixture::new();
        let agreed = u64_payload(&[1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 15]);
        pair.send(&encode_message(16, 1, &agreed), &[], usize::MAX).unwrap();
        pair.send(&encode_message(32, 9, &inflight_payload(len, 0, 2, 64)), &[1], usize::MAX)
            .unwrap();
        (pair.server.take_rejection().map(|why| why.to_string()), pair.log.len())
    };
    assert_eq!(of(needed), (None, 1));
    let (why, asked) = of(needed - 1);
    assert_eq!(asked, 0);
    assert!(why.unwrap().contains("size is 0x87f, expected room for what all queues have"));
}

#[test]
fn messages_of_unnegotiated_features_are_rejected() {
    for (code, payload) in [
        (17, vec![]),
        (24, u32_payload(&[0, 0, 0])),
        (31, inflight_payload(0, 0, 1, 64)),
        (36, vec![]),
    ] {
        let mut pair = ServerFixture::new();
        let over = pair.send(&encode_message(code, 1, &payload), &[], usize::MAX).unwrap_err();
        assert!(over.to_string().contains("not negotiated"), "{over}");
    }
}
