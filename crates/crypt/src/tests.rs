//! Known answers, and a device through the cipher compared with a plain array.

mod luks;

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

use tenmil_base::Error;
use tenmil_base::{
    CompletionBatch, ErrorCategory, Instant, IoChannel, IoStatus, Memory, Operation, Random,
    Request, RequestFlags, Segment,
};
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::cipher::{CipherDirection, XtsCipher};
use crate::{CryptDevice, XtsKey};

fn bytes_from_hex(digits: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(digit).collect()
}

/// A key file in a directory of its own.
fn write_key_file(bytes: &[u8], mode: u32) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    #[expect(clippy::disallowed_methods, reason = "a test may")]
    std::fs::write(&path, bytes).unwrap();
    set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    (directory, path.display().to_string())
}

fn key_from_bytes(bytes: &[u8]) -> XtsKey {
    let (_directory, path) = write_key_file(bytes, 0o600);
    XtsKey::read(path.as_ref()).unwrap()
}

/// The halves of the key of vectors 10 to 14 of IEEE 1619-2007, annex B.
const KEY: &str = "2718281828459045235360287471352662497757247093699959574966967627\
                   3141592653589793238462643383279502884197169399375105820974944592";

#[test]
fn cipher_matches_ieee_1619_test_vectors() {
    // Vector 10: data unit ffh, whose plain text is 00h to ffh, twice.
    let plain: Vec<u8> = (0..512_u32).map(|byte| u8::try_from(byte % 256).unwrap()).collect();
    let start = bytes_from_hex("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b");
    let end = bytes_from_hex("c4f36ffda9fcea70b9c6e693e148c151");
    let mut bytes = plain.clone();
    let key = key_from_bytes(&bytes_from_hex(KEY));
    assert!(
        XtsCipher::new(&key, CipherDirection::Encrypt).unwrap().apply_to_units(0xff, &mut bytes)
    );
    assert_eq!(bytes[..32], start);
    assert_eq!(bytes[496..], end);
    assert!(
        XtsCipher::new(&key, CipherDirection::Decrypt).unwrap().apply_to_units(0xff, &mut bytes)
    );
    assert_eq!(bytes, plain);
    // Vector 11: data unit ffffh.
    assert!(
        XtsCipher::new(&key, CipherDirection::Encrypt).unwrap().apply_to_units(0xffff, &mut bytes)
    );
    assert_eq!(bytes[..16], bytes_from_hex("77a31251618a15e6b92d1d66dffe7b50"));
}

#[test]
fn tweak_increments_per_unit() {
    let key = key_from_bytes(&bytes_from_hex(KEY));
    let mut cipher = XtsCipher::new(&key, CipherDirection::Encrypt).unwrap();
    let mut together = vec![7; 4 * 512];
    assert!(cipher.apply_to_units(u64::from(u32::MAX) - 1, &mut together));
    for (unit, part) in (u64::from(u32::MAX) - 1..).zip(together.chunks(512)) {
        let mut alone = vec![7; 512];
        assert!(cipher.apply_to_units(unit, &mut alone));
        assert_eq!(alone, part, "unit {unit}");
    }
}

struct CryptFixture {
    regions: RegionTable,
    memory: Segment,
}

impl CryptFixture {
    fn new() -> Self {
        let regions = RegionTable::new(32);
        let mapping =
            tenmil_dma::MemoryMapping::new(1 << 20, tenmil_dma::MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(mapping).unwrap();
        Self { regions, memory }
    }

    fn open(&self, uri: &str) -> Result<OpenedDevice, Error> {
        let crypt: &dyn DeviceType = &crate::open;
        let kinds = [&[("crypt", crypt)], tenmil_drivers::KINDS].concat();
        let clock = Clock::start();
        Opener { regions: &self.regions, clock, seed: 1, kinds: &kinds }.open(&uri.parse::<Uri>()?)
    }

    /// Executes a single request.
    fn run_request(
        &self,
        channel: &mut dyn IoChannel,
        operation: Operation,
        lba: u64,
        blocks: u32,
        segments: &[Segment],
    ) -> IoStatus {
        let request = Request {
            token: 1 << 40,
            lba,
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: u16::try_from(segments.len()).unwrap(),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let now = Instant::default();
        let mut completions = CompletionBatch::with_capacity(1);
        assert_eq!(channel.submit(now, &[request], segments), 1);
        channel.flush_submissions();
        while channel.poll(now, &mut completions) == 0 {}
        let completion = completions.as_slice()[0];
        assert_eq!(completion.token, request.token);
        completion.status
    }

    /// Memory of `len` bytes, cut at random positions.
    fn random_segments(&self, len: usize, random: &mut Random) -> Vec<Segment> {
        let (mut at, mut left) = (u32::try_from(random.below(100)).unwrap(), len);
        let mut segments = Vec::new();
        while left > 0 {
            let most = if segments.len() == 5 { left } else { left.min(3_000) };
            let drawn = usize::try_from(random.below(most as u64)).unwrap() + 1;
            let count = if segments.len() == 5 { left } else { drawn };
            segments.push(self.memory.slice(at, u32::try_from(count).unwrap()).unwrap());
            at += u32::try_from(count).unwrap() + u32::try_from(random.below(50)).unwrap();
            left -= count;
        }
        segments
    }

    fn write_segments(&self, segments: &[Segment], mut bytes: &[u8]) {
        for segment in segments {
            let (part, rest) = bytes.split_at(segment.len_bytes as usize);
            self.regions.store(*segment, part).unwrap();
            bytes = rest;
        }
    }

    fn read_segments(&self, segments: &[Segment]) -> Vec<u8> {
        let load = |segment: &Segment| {
            let mut bytes = vec![0; segment.len_bytes as usize];
            self.regions.load(*segment, &mut bytes).unwrap();
            bytes
        };
        segments.iter().flat_map(load).collect()
    }
}

#[test]
fn written_data_is_read_back_with_any_segmentation() {
    let (_directory, path) = write_key_file(KEY.as_bytes(), 0o600);
    for block in [512_usize, 4096] {
        let bench = CryptFixture::new();
        let uri = format!("crypt:[ram:1m?block={block}]?key-file={path}");
        let medium = bench.open(&uri).unwrap().medium;
        let mut channels = [medium.channel().unwrap(), medium.channel().unwrap()];
        let mut random = Random::new(9);
        let mut blocks = vec![None; 64];
        for round in 0..600 {
            let channel = &mut *channels[round % 2];
            let first = random.below(60);
            let count = usize::try_from(random.below(4) + 1).unwrap();
            let (lba, many) = (first, u32::try_from(count).unwrap());
            let range = usize::try_from(first).unwrap()..usize::try_from(first).unwrap() + count;
            let segments = bench.random_segments(count * block, &mut random);
            if random.chance(1, 2) {
                let bytes: Vec<u8> =
                    (0..count * block).map(|_| random.next_u64().to_le_bytes()[0]).collect();
                bench.write_segments(&segments, &bytes);
                let status = bench.run_request(channel, Operation::Write, lba, many, &segments);
                assert_eq!(status, IoStatus::SUCCESS);
                assert_eq!(
                    bench.read_segments(&segments),
                    bytes,
                    "the caller's data stays as it is"
                );
                for (place, bytes) in blocks[range].iter_mut().zip(bytes.chunks(block)) {
                    *place = Some(bytes.to_vec());
                }
                continue;
            }
            let status = bench.run_request(channel, Operation::Read, lba, many, &segments);
            assert_eq!(status, IoStatus::SUCCESS);
            let bytes = bench.read_segments(&segments);
            for (place, bytes) in blocks[range].iter().zip(bytes.chunks(block)) {
                assert!(place.as_ref().is_none_or(|expected| expected == bytes), "round {round}");
            }
            let status = bench.run_request(channel, Operation::Compare, lba, many, &segments);
            assert_eq!(status, IoStatus::SUCCESS, "what was read compares equal");
            bench.write_segments(&segments[..1], &vec![0x5a; segments[0].len_bytes as usize]);
            let status = bench.run_request(channel, Operation::Compare, lba, many, &segments);
            assert_eq!(status, IoStatus::COMPARE_FAILURE);
        }
    }
}

#[test]
fn device_holds_ciphertext_and_a_wrong_key_reads_garbage() {
    let bench = CryptFixture::new();
    let raw = bench.open("ram:1m").unwrap().medium;
    let with = |bytes: &[u8]| {
        CryptDevice::new(&bench.regions, raw.clone(), key_from_bytes(bytes)).unwrap()
    };
    let read = |medium: &dyn tenmil_base::BlockDevice, lba| {
        let segment = bench.memory.slice(0, 1024).unwrap();
        let mut channel = medium.channel().unwrap();
        let status = bench.run_request(&mut *channel, Operation::Read, lba, 2, &[segment]);
        assert_eq!(status, IoStatus::SUCCESS);
        bench.read_segments(&[segment])
    };
    let good = with(&bytes_from_hex(KEY));
    let segment = bench.memory.slice(0, 1024).unwrap();
    bench.write_segments(&[segment], &[0x11; 1024]);
    let mut channel = tenmil_base::BlockDevice::channel(&good).unwrap();
    assert_eq!(
        bench.run_request(&mut *channel, Operation::Write, 40, 2, &[segment]),
        IoStatus::SUCCESS
    );
    let mut expected = vec![0x11; 1024];
    let mut cipher =
        XtsCipher::new(&key_from_bytes(&bytes_from_hex(KEY)), CipherDirection::Encrypt).unwrap();
    assert!(cipher.apply_to_units(40, &mut expected));
    assert_eq!(read(&*raw, 40), expected);
    assert_eq!(read(&good, 40), [0x11; 1024]);
    let mut other = bytes_from_hex(KEY);
    other[63] ^= 1;
    let garbage = read(&with(&other), 40);
    assert!(garbage != [0x11; 1024] && garbage != expected);
    // A deallocated block reads as something other than zeroes.
    assert_eq!(
        bench.run_request(&mut *channel, Operation::Deallocate, 40, 2, &[]),
        IoStatus::SUCCESS
    );
    assert!(read(&good, 40) != [0; 1024]);
    let extent = tenmil_base::BlockDevice::block_status(&good, 40).unwrap();
    assert_eq!(extent.kind, tenmil_base::ExtentKind::Data);
    for missing in [Operation::WriteZeroes, Operation::Copy] {
        assert!(!tenmil_base::BlockDevice::limits(&good).operations.has(missing));
        assert_eq!(bench.run_request(&mut *channel, missing, 0, 1, &[]), IoStatus::INVALID_OPCODE);
    }
}

#[test]
fn full_channel_returns_unaccepted_requests_and_completes_each_once() {
    let (_directory, path) = write_key_file(KEY.as_bytes(), 0o600);
    let bench = CryptFixture::new();
    let uri = format!("crypt:[model:[ram:1m]?device=p4800x]?key-file={path}");
    let mut channel = bench.open(&uri).unwrap().medium.channel().unwrap();
    let depth = channel.limits().depth_max as usize;
    let segment = bench.memory.slice(0, 512).unwrap();
    let requests: Vec<Request> = (0..depth as u64 + 9)
        .map(|token| Request {
            token,
            lba: token,
            operand: 0,
            segment_first: 0,
            blocks: 1,
            segment_count: 1,
            metadata_count: 0,
            operation: Operation::Read,
            flags: RequestFlags::NONE,
        })
        .collect();
    assert_eq!(channel.submit(Instant::default(), &requests, &[segment]), depth);
    assert_eq!(channel.submit(Instant::default(), &requests[depth..], &[segment]), 0);
    let mut seen = vec![0; depth];
    let mut completions = CompletionBatch::with_capacity(7);
    let mut now = Instant::default();
    while seen.contains(&0) {
        now = now.max(channel.wake_at());
        channel.poll(now, &mut completions);
        for completion in completions.drain() {
            assert_eq!(completion.status, IoStatus::SUCCESS);
            seen[usize::try_from(completion.token).unwrap()] += 1;
        }
    }
    assert!(seen.iter().all(|count| *count == 1));
    assert_eq!(channel.wake_at(), Instant::NEVER);
}

#[test]
fn requests_with_wrong_memory_length_are_rejected() {
    let (_directory, path) = write_key_file(KEY.as_bytes(), 0o600);
    let bench = CryptFixture::new();
    let medium = bench.open(&format!("crypt:[ram:1m]?key-file={path}")).unwrap().medium;
    let mut channel = medium.channel().unwrap();
    let segment = bench.memory.slice(0, 512).unwrap();
    let stray = Segment { region: tenmil_base::RegionId(31), ..segment };
    for operation in [Operation::Read, Operation::Write, Operation::Compare] {
        for (lba, blocks, segments, expected) in [
            (2048, 1, &[segment][..], IoStatus::LBA_OUT_OF_RANGE),
            (u64::MAX, 1, &[segment], IoStatus::LBA_OUT_OF_RANGE),
            (0, 2, &[segment], IoStatus::INVALID_FIELD),
            (0, 1, &[], IoStatus::INVALID_FIELD),
            (0, 1, &[stray], IoStatus::DATA_TRANSFER_ERROR),
        ] {
            let status = bench.run_request(&mut *channel, operation, lba, blocks, segments);
            assert_eq!(status, expected, "{operation:?} {lba} {blocks}");
        }
    }
}

#[test]
fn key_is_not_in_the_uri_and_a_world_readable_key_file_is_rejected() {
    let bench = CryptFixture::new();
    let (_directory, path) = write_key_file(KEY.as_bytes(), 0o600);
    let (_other_directory, open) = write_key_file(KEY.as_bytes(), 0o644);
    for (uri, expected) in [
        (format!("crypt:[ram:1m]?key={KEY}"), "crypt: found a key in the name, where other users"),
        ("crypt:[ram:1m]".into(), "crypt:[ram:1m]: the key is missing, expected crypt:["),
        (format!("crypt:[ram:1m]?key-file={open}"), "its mode is 644, expected one that only its"),
        (format!("crypt:[ram:1m]?key-file={path}x"), "No such file or directory"),
        (format!("crypt:ram?key-file={path}"), "stands on 0 devices, expected one in brackets"),
        (format!("crypt:[ram:1m]?key-file={path}&mode=xts"), "no parameter `mode`, expected key"),
    ] {
        let refused = bench.open(&uri).unwrap_err();
        assert_eq!(refused.category(), ErrorCategory::Usage);
        assert!(refused.to_string().contains(expected), "{refused}");
        assert!(!refused.to_string().contains(&KEY[..16]), "{refused}");
    }
    let opened = bench.open(&format!("crypt:[ram:1m]?key-file={path}")).unwrap();
    assert_eq!(
        opened.description,
        "AES-256-XTS over units of 512 bytes; over ram: volatile, lost when the process exits"
    );
}
