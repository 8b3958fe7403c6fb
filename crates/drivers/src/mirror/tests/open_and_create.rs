//! Errors of opening a mirror, and its description when legs are missing.

#![expect(clippy::disallowed_methods, reason = "a test may")]

use std::path::Path;

use tenmil_base::BlockDevice;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::mirror::{Mirror, MirrorOptions, MirrorReport, create_mirror, read_mirror_report};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

struct MirrorFilesFixture {
    directory: tempfile::TempDir,
    regions: RegionTable,
}

impl MirrorFilesFixture {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), regions: RegionTable::new(200) }
    }

    fn opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: Clock::start(), seed: 1, kinds: crate::KINDS }
    }

    fn leg_uri(&self, name: &str, query: &str) -> Uri {
        let path = self.directory.path().join(name);
        format!("file:{}?engine=threads{query}", path.display()).parse().unwrap()
    }

    fn create(&self, legs: &[Uri], overwrite: bool) -> Result<String, Error> {
        create_mirror(&self.opener(), legs, overwrite).map_err(Error::environment)
    }

    fn open(&self, legs: &[&str]) -> Result<OpenedDevice, Error> {
        self.opener().open(&self.mirror_uri(legs))
    }

    /// Opens with `degraded`: although a leg is absent that may hold newer blocks.
    fn open_degraded(&self, legs: &[&str]) -> Result<OpenedDevice, Error> {
        let uri = format!("{}?degraded=yes", self.mirror_uri(legs));
        self.opener().open(&uri.parse().unwrap())
    }

    fn mirror_uri(&self, legs: &[&str]) -> Uri {
        let legs = legs.iter().map(|leg| format!("[{}]", self.leg_uri(leg, "")));
        format!("mirror:{}", legs.collect::<Vec<_>>().join(",")).parse().unwrap()
    }

    fn read_status(&self, legs: &[&str]) -> MirrorReport {
        read_mirror_report(&self.opener(), &self.mirror_uri(legs)).unwrap()
    }

    fn copy_leg_file(&self, from: &str, to: &str) {
        let path = |name: &str| self.directory.path().join(name);
        std::fs::copy(path(from), path(to)).unwrap();
    }

    /// Writes a block of the mirror, and waits until the write and its consequences are done.
    fn write_block_and_settle(&self, opened: &OpenedDevice) {
        use tenmil_base::{CompletionBatch, IoStatus, Operation, Request, RequestFlags};
        use tenmil_dma::{MemoryBacking, MemoryMapping};
        let memory = self
            .regions
            .add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap())
            .unwrap();
        let block = memory.slice(0, opened.medium.limits().block_size).unwrap();
        let request = Request {
            token: 1,
            lba: 7,
            operand: 0,
            segment_first: 0,
            blocks: 1,
            segment_count: 1,
            metadata_count: 0,
            operation: Operation::Write,
            flags: RequestFlags::FUA,
        };
        let clock = Clock::start();
        let mut channel = opened.medium.channel().unwrap();
        let mut completions = CompletionBatch::with_capacity(1);
        assert_eq!(channel.submit(clock.now(), &[request], &[block]), 1);
        while completions.as_slice().is_empty() {
            channel.poll(clock.now(), &mut completions);
        }
        assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS);
    }
}

fn fixture_with_mirror() -> MirrorFilesFixture {
    let bench = MirrorFilesFixture::new();
    let size = "&size=4m";
    let said = bench.create(&[bench.leg_uri("a", size), bench.leg_uri("b", size)], false).unwrap();
    assert!(said.contains(": 2 legs, 3145728 bytes, "), "{said}");
    bench
}

#[test]
fn created_mirror_opens_with_legs_in_any_order() {
    let bench = fixture_with_mirror();
    for legs in [["a", "b"], ["b", "a"]] {
        let opened = bench.open(&legs).unwrap();
        assert!(opened.description.contains(": 2 of 2 legs in sync"), "{}", opened.description);
        assert!(!opened.description.contains("degraded"));
        assert_eq!(opened.medium.limits().block_count, 6144, "without what the superblocks take");
        assert_eq!(opened.existing.len(), 2, "both legs hold something");
    }
}

#[test]
fn degraded_mirror_opens_only_on_request() {
    let bench = fixture_with_mirror();
    for legs in [&["b"][..], &["b", "missing"]] {
        let refused = bench.open(legs).unwrap_err().to_string();
        assert!(refused.contains(": leg 0 is absent") && refused.contains("?degraded=yes"));
    }
    bench.copy_leg_file("b", "b-before");
    for legs in [&["b"][..], &["b", "missing"]] {
        bench.copy_leg_file("b-before", "b");
        let description = bench.open_degraded(legs).unwrap().description;
        assert!(description.contains(": 1 of 2 legs in sync, degraded"), "{description}");
        assert!(description.contains("; leg 0 is missing"), "{description}");
    }
    let description = bench.open(&["b", "missing"]).unwrap().description;
    assert!(description.contains("missing?engine=threads cannot be had: "), "{description}");
    // The other leg is stale from the moment this one was opened without it.
    let refused = bench.open(&["a"]).unwrap_err().to_string();
    assert!(refused.contains(": leg 1 is absent"), "{refused}");
    let description = bench.open(&["a", "b"]).unwrap().description;
    assert!(description.contains("; leg 0 (file:"), "{description}");
    assert!(description.contains(") is stale and is copied to"), "{description}");
}

#[test]
fn leg_that_missed_a_write_is_stale_and_diverged_legs_are_rejected() {
    let bench = fixture_with_mirror();
    assert!(bench.open(&["a", "b"]).unwrap().description.contains("2 of 2 legs in sync"));

    bench.copy_leg_file("b", "b-before");
    bench.write_block_and_settle(&bench.open_degraded(&["a"]).unwrap());
    let report = bench.read_status(&["a", "b"]);
    let said: Vec<u8> = report.legs.iter().map(|(_, leg)| leg.as_ref().unwrap().in_sync).collect();
    assert_eq!(said, [0b01, 0b11], "the leg that was absent knows nothing of it");
    let description = report.verdict.unwrap();
    assert!(description.contains("is stale and is copied to"), "{description}");

    bench.write_block_and_settle(&bench.open_degraded(&["b"]).unwrap());
    let refused = bench.open(&["a", "b"]).unwrap_err().to_string();
    assert!(refused.contains("each record that the other is stale"), "{refused}");
    assert!(refused.contains("/a?") && refused.contains("/b?"), "{refused}");
    assert_eq!(bench.read_status(&["a", "b"]).verdict.is_err(), refused.contains("stale"));
    // With the leg as it was before, the verdict is certain.
    bench.copy_leg_file("b-before", "b");
    assert!(bench.open(&["a", "b"]).unwrap().description.contains("1 of 2 legs in sync"));
}

#[test]
fn invalid_leg_is_rejected_with_a_hint() {
    let bench = fixture_with_mirror();
    let size = "&size=4m";
    bench.create(&[bench.leg_uri("c", size), bench.leg_uri("d", size)], false).unwrap();
    drop(bench.opener().open(&bench.leg_uri("raw", size)).unwrap());
    for (legs, expected) in [
        (&["a", "raw"][..], "found no superblock, expected one; a mirror is made by"),
        (&["a", "d"], " is a leg of mirror "),
        (&["a", "b", "missing"], "3 legs are given, expected at most 2"),
        (&["missing"], "no leg is in sync: "),
        (&["b"], "leg 0 is absent, and may hold newer blocks than leg 1 (file:"),
    ] {
        let refused = bench.open(legs).unwrap_err().to_string();
        assert!(refused.starts_with("mirror:[file:") && refused.contains(expected), "{refused}");
    }
    let path = bench.directory.path().join("b");
    let mut bytes = std::fs::read(&path).unwrap();
    (bytes[100], bytes[65_636]) = (1, 1);
    std::fs::write(Path::new(&path), bytes).unwrap();
    let refused = bench.open(&["a", "b"]).unwrap_err().to_string();
    assert!(refused.contains("b?engine=threads has a damaged superblock: its CRC"), "{refused}");
    assert!(bench.open(&["a"]).is_err() && bench.open_degraded(&["a"]).is_ok());
}

#[test]
fn create_rejects_existing_data_and_unlike_legs() {
    let bench = fixture_with_mirror();
    let size = "&size=4m";
    let [a, c] = [bench.leg_uri("a", ""), bench.leg_uri("c", size)];
    let refused = bench.create(&[a.clone(), c.clone()], false).unwrap_err();
    assert!(refused.text.starts_with("mirror create would destroy what is there: "), "{refused}");
    assert!(
        refused.text.contains("/a (4194304 bytes; tenmil mirror \"leg 0 of 2\" ")
            && refused.text.contains("--overwrite"),
        "{refused}"
    );
    assert!(!refused.text.contains("/c ("), "{refused}");
    assert!(bench.open(&["a", "b"]).is_ok(), "nothing was touched");
    bench.create(&[a.clone(), c.clone()], true).unwrap();
    assert!(bench.open(&["a", "c"]).is_ok() && bench.open(&["a", "b"]).is_err());

    let block = bench.leg_uri("e", "&size=4m&block=4k");
    let short = bench.leg_uri("f", "&size=1m");
    for (legs, expected) in [
        (vec![c.clone()], "1 legs are given, expected 2 to 8"),
        (vec![c.clone(), c.clone()], " are one device, expected different ones"),
        (vec![c.clone(), block], "has blocks of 4096 bytes, expected 512 as on "),
        (vec![c.clone(), short], "the shortest leg has 2048 blocks of 512 bytes"),
        (vec![c, bench.leg_uri("missing", "")], "make a mirror: "),
    ] {
        let refused = bench.create(&legs, true).unwrap_err();
        assert!(refused.text.contains(expected), "{refused}");
    }
}

#[test]
fn invalid_mirror_uri_is_rejected_with_the_accepted_form() {
    let bench = fixture_with_mirror();
    for (name, expected) in [
        ("mirror:", "the legs are missing, expected mirror:[URI],[URI]"),
        ("mirror:[ram:1m]?resync=0", "resync is 0 bytes per second, expected at least 1"),
        ("mirror:[ram:1m]?speed=1", "no parameter `speed`, expected resync or degraded"),
    ] {
        let refused = bench.opener().open(&name.parse().unwrap()).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let refused =
        read_mirror_report(&bench.opener(), &"ram:1m".parse().unwrap()).unwrap_err().to_string();
    assert_eq!(refused, "ram:1m: not a mirror, expected mirror:[URI],[URI]");
}

#[test]
fn description_names_the_legs_it_was_opened_with() {
    let bench = fixture_with_mirror();
    let legs = ["a", "b"].map(|name| super::super::MirrorLegDevice {
        name: name.into(),
        medium: bench
            .opener()
            .open(&bench.leg_uri(name, ""))
            .map(|opened| opened.medium)
            .map_err(Error::environment),
    });
    let clock = Clock::start();
    let mirror =
        Mirror::open(&bench.regions, &legs, &MirrorOptions::default(), &mut || clock.now())
            .unwrap();
    assert!(mirror.description().starts_with("mirror "));
    assert_eq!(mirror.in_sync_mask_and_remaining_regions().0, 0b11);
    assert_eq!(mirror.channels_max(), u32::MAX);
}
