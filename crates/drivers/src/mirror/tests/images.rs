//! Mirrors that earlier versions have made: each opens and holds what was written.

#![expect(clippy::disallowed_methods, reason = "a test may")]

use std::fmt::Write as _;
use std::path::Path;

use tenmil_base::{CompletionBatch, Error, IoStatus, Memory, Operation, Request};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use tenmil_block::{OpenedDevice, Opener};

const TWO_IN_SYNC: &str = include_str!("images/two-in-sync.txt");
const TWO_ONE_STALE: &str = include_str!("images/two-one-stale.txt");
const THREE_IN_SYNC: &str = include_str!("images/three-in-sync.txt");
const THREE_ONE_STALE: &str = include_str!("images/three-one-stale.txt");
const THREE_ONE_FRESH: &str = include_str!("images/three-one-fresh.txt");

/// Writes the legs of an image to files and returns their names.
fn unpack_image(image: &str, directory: &Path) -> Vec<String> {
    let mut legs: Vec<(String, Vec<u8>)> = Vec::new();
    for line in image.lines().filter(|line| !line.starts_with('#')) {
        if let Some((name, len)) = line.strip_prefix("leg ").and_then(|leg| leg.split_once(' ')) {
            legs.push((name.into(), vec![0; len.parse().unwrap()]));
            continue;
        }
        let (at, bytes) = line.split_once(' ').unwrap();
        let (bytes, count) = bytes.split_once('*').unwrap_or((bytes, "1"));
        let byte = |index| u8::from_str_radix(&bytes[index..index + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..bytes.len()).step_by(2).map(byte).collect();
        let bytes = bytes.repeat(count.parse().unwrap());
        let at: usize = at.parse().unwrap();
        legs.last_mut().unwrap().1[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    for (name, bytes) in &legs {
        std::fs::write(directory.join(name), bytes).unwrap();
    }
    legs.into_iter().map(|(name, _)| name).collect()
}

/// Opens a mirror of these files.
fn open_mirror_of_files(
    regions: &RegionTable,
    directory: &Path,
    legs: &[&str],
) -> Result<OpenedDevice, Error> {
    let mut uri = "mirror:".to_owned();
    for (index, leg) in legs.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let path = directory.join(leg);
        write!(uri, "{comma}[file:{}?engine=threads]", path.display()).unwrap();
    }
    let opener = Opener { regions, clock: Clock::start(), seed: 1, kinds: crate::KINDS };
    opener.open(&uri.parse().unwrap()).map_err(Error::environment)
}

/// The first byte of a block of the mirror.
fn read_first_byte(regions: &RegionTable, opened: &OpenedDevice, lba: u64) -> u8 {
    let memory = regions.allocate_region(512).unwrap();
    let segment = memory.segment().slice(0, 512).unwrap();
    let operation = Operation::Read;
    let request = Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
    let clock = Clock::start();
    let mut channel = opened.medium.channel().unwrap();
    assert_eq!(channel.submit(clock.now(), &[request], &[segment]), 1);
    let mut completions = CompletionBatch::with_capacity(1);
    while completions.as_slice().is_empty() {
        channel.poll(clock.now(), &mut completions);
    }
    assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS);
    let mut byte = [0];
    regions.load(segment.slice(0, 1).unwrap(), &mut byte).unwrap();
    byte[0]
}

#[test]
fn version_2_mirror_image_opens_with_its_data() {
    for (image, said, lba, byte) in [
        (TWO_IN_SYNC, "2 of 2 legs in sync", 0, 0x11),
        (TWO_IN_SYNC, "2 of 2 legs in sync", 256, 0x12),
        (TWO_ONE_STALE, "1 of 2 legs in sync, degraded; leg 1 (file:", 0, 0x21),
        (THREE_IN_SYNC, "3 of 3 legs in sync", 128, 0x31),
        (THREE_ONE_STALE, "2 of 3 legs in sync, degraded; leg 2 (file:", 128, 0x32),
        (THREE_ONE_FRESH, "2 of 3 legs in sync, degraded; leg 2 (file:", 256, 0x12),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let regions = RegionTable::new(100);
        let legs = unpack_image(image, directory.path());
        let legs: Vec<&str> = legs.iter().map(String::as_str).collect();
        // Once as it was left, and once as the first opening has left it, when legs may have been copied
        // to.
        for is_old in [true, false] {
            let opened = open_mirror_of_files(&regions, directory.path(), &legs).unwrap();
            let description = &opened.description;
            assert!(!is_old || description.contains(said), "{description}");
            assert_eq!(read_first_byte(&regions, &opened, lba), byte, "{said}");
        }
        // An older version must not find a superblock copy that it accepts.
        let bytes = std::fs::read(directory.path().join("a")).unwrap();
        assert_eq!([bytes[8], bytes[(64 << 10) + 8]], [3, 3], "{said}");
    }
}

#[test]
fn stale_version_2_leg_does_not_start_alone() {
    for (image, survivors, stale) in
        [(TWO_ONE_STALE, &["a"][..], "b"), (THREE_ONE_STALE, &["a", "b"], "c")]
    {
        let directory = tempfile::tempdir().unwrap();
        let regions = RegionTable::new(100);
        unpack_image(image, directory.path());
        let refused = open_mirror_of_files(&regions, directory.path(), &[stale]).unwrap_err();
        assert!(refused.text.contains("and may hold newer blocks than leg"), "{refused}");
        let opened = open_mirror_of_files(&regions, directory.path(), survivors).unwrap();
        assert!(opened.description.contains(" is missing"), "{}", opened.description);
    }
}
