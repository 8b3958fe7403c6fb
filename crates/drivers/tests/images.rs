//! Pools that the first format made (`tests/images/`): each opens, checks clean, holds what was written to
//! it, and takes new writes.
//!
//! An image is a sequence of runs: how many zeroes come first (32 bits, little-endian), how many bytes follow
//! (16 bits), and these bytes.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::path::Path;

use tenmil_base::{CompletionBatch, IoChannel, Memory, Operation, Request, RequestFlags, Span};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_drivers::pool::{OpenPool, PAGE_BYTES, VolumeOp, VolumeRef, check_closed_pool};
use tenmil_linux::Clock;

fn unpack_image(directory: &Path, name: &str, runs: &[u8]) -> Uri {
    let (mut bytes, mut rest) = (Vec::new(), runs);
    while let Some((head, after)) = rest.split_at_checked(6) {
        let zeroes = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        let (some, after) = after.split_at(u16::from_le_bytes([head[4], head[5]]).into());
        bytes.resize(bytes.len() + zeroes, 0);
        bytes.extend_from_slice(some);
        rest = after;
    }
    let path = directory.join(name);
    #[expect(clippy::disallowed_methods, reason = "it puts the image there")]
    std::fs::write(&path, bytes).unwrap();
    format!("file:{}?engine=threads", path.display()).parse().unwrap()
}

fn with_opener<T>(body: impl FnOnce(&Opener<'_>) -> T) -> T {
    let regions = RegionTable::new(64);
    body(&Opener {
        regions: &regions,
        clock: Clock::start(),
        seed: 1,
        kinds: tenmil_drivers::KINDS,
    })
}

/// What the blocks of a volume begin with, without the zeroes behind it.
fn read_block_texts(opener: &Opener<'_>, volume: &Uri) -> Vec<String> {
    let opened = opener.open(volume).unwrap();
    let blocks = u32::try_from(opened.medium.limits().block_count).unwrap();
    let mut channel = opened.medium.channel().unwrap();
    let memory = opener.regions.allocate_region(PAGE_BYTES as usize).unwrap();
    let mut read = |block: u32| {
        let mut bytes = vec![0; PAGE_BYTES as usize];
        let request = Request {
            lba: block.into(),
            blocks: 1,
            segment_count: 1,
            operation: Operation::Read,
            flags: RequestFlags::NONE,
            ..Request::PLACEHOLDER
        };
        run_request(opener, &mut *channel, request, &[memory.segment()]);
        opener.regions.load(memory.segment(), &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap().trim_end_matches('\0').to_owned()
    };
    (0..blocks).map(&mut read).collect()
}

fn run_request(
    opener: &Opener<'_>,
    channel: &mut dyn IoChannel,
    request: Request,
    segments: &[tenmil_base::Segment],
) {
    let (mut completions, until) =
        (CompletionBatch::with_capacity(1), opener.clock.now().after(Span::from_secs(20)));
    let mut is_taken = false;
    while completions.is_empty() {
        let now = opener.clock.now();
        assert!(now < until, "no answer in 20 s");
        is_taken = is_taken || channel.submit(now, &[request], segments) == 1;
        channel.flush_submissions();
        channel.poll(now, &mut completions);
        tenmil_linux::named_thread::yield_cpu();
    }
    assert!(completions.as_slice()[0].status.is_success(), "{completions:?}");
}

fn expected_contents(word: &str, blocks: usize, written: usize, zeroes: &[usize]) -> Vec<String> {
    let block = |block: usize| match block < written && !zeroes.contains(&block) {
        true => format!("{word} block {block}"),
        false => String::new(),
    };
    (0..blocks).map(block).collect()
}

fn volume_uri(device: &Uri, name: &str) -> Uri {
    VolumeRef::pool_on(device).uri_of_other_volume(name)
}

/// It is what it was, before and after a change has been made to it.
fn check_image(opener: &Opener<'_>, place: &VolumeRef, volumes: &[(&str, Vec<String>)]) {
    for round in ["as it was made", "after a change", "after that was closed"] {
        let checked = check_closed_pool(opener, place).unwrap();
        assert!(checked.damaged.is_empty() && checked.report.findings.is_empty(), "{round}");
        for (name, blocks) in volumes {
            assert_eq!(
                &read_block_texts(opener, &volume_uri(&place.store, name)),
                blocks,
                "{name} {round}"
            );
        }
        let open = OpenPool::open(opener, place).unwrap();
        if round == "as it was made" {
            let (name, blocks) = ("more".into(), 4);
            let change = VolumeOp::Create { name, blocks, unit: 1, uuid: 7, checksums: false };
            open.execute_volume_op(change).unwrap();
        }
        assert_eq!(open.list_volumes().unwrap().len(), volumes.len() + 1, "{round}");
    }
}

#[test]
fn format_1_pool_with_snapshots_clone_and_checksums_opens() {
    let directory = tempfile::tempdir().unwrap();
    let device = unpack_image(directory.path(), "one", include_bytes!("images/one.runs"));
    let first = expected_contents("first", 24, 24, &[5, 6, 7, 8]);
    let second = expected_contents("second", 24, 24, &[1]);
    let volumes =
        [("plain", second.clone()), ("monday", first.clone()), ("trial", first), ("safe", second)];
    with_opener(|opener| check_image(opener, &VolumeRef::pool_on(&device), &volumes));
}

#[test]
fn format_1_pool_over_two_devices_opens() {
    let directory = tempfile::tempdir().unwrap();
    let first = unpack_image(directory.path(), "two-a", include_bytes!("images/two-a.runs"));
    let second = unpack_image(directory.path(), "two-b", include_bytes!("images/two-b.runs"));
    with_opener(|opener| {
        // Where the second one was is not where it is.
        let place = VolumeRef { moved: vec![(1, second.clone())], ..VolumeRef::pool_on(&first) };
        let open = OpenPool::open(opener, &place).unwrap();
        assert!(open.record_device_uris().unwrap());
        drop(open);
        check_image(opener, &place, &[("spread", expected_contents("spread", 1024, 500, &[]))]);
    });
}

#[test]
fn format_1_pool_with_a_thick_volume_opens() {
    let directory = tempfile::tempdir().unwrap();
    let device = unpack_image(directory.path(), "thick", include_bytes!("images/thick.runs"));
    let log = expected_contents("thick", 16, 16, &[]);
    with_opener(|opener| check_image(opener, &VolumeRef::pool_on(&device), &[("log", log)]));
}
