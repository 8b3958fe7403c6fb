//! Ownership of a mirror, and what happens to the former owner.

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoChannel, IoStatus, Operation, Request, Segment,
};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::mirror::assembly::{LegCandidate, LegReadResult};
use crate::mirror::{
    InjectedBugs, Mirror, MirrorLegDevice, MirrorOptions, OpenedLegs, create_mirror, open_legs,
    read_leg_candidates, take_over_mirror,
};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_volume::mirror::MirrorSuperblock;

const RESERVATION_CONFLICT: IoStatus = IoStatus::RESERVATION_CONFLICT;

pub(super) struct OwnershipFixture {
    directory: tempfile::TempDir,
    regions: RegionTable,
    pub(super) clock: Clock,
}

impl OwnershipFixture {
    /// Two files that form a mirror.
    pub(super) fn new() -> Self {
        let bench = Self {
            directory: tempfile::tempdir().unwrap(),
            regions: RegionTable::new(200),
            clock: Clock::start(),
        };
        let legs = ["a", "b"].map(|name| bench.leg_uri(name, "&size=4m"));
        create_mirror(&bench.opener(), &legs, false).unwrap();
        bench
    }

    fn opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: self.clock, seed: 1, kinds: crate::KINDS }
    }

    fn leg_uri(&self, name: &str, query: &str) -> Uri {
        let path = self.directory.path().join(name);
        format!("file:{}?engine=threads{query}", path.display()).parse().unwrap()
    }

    fn mirror_uri(&self) -> Uri {
        format!("mirror:[{}],[{}]", self.leg_uri("a", ""), self.leg_uri("b", "")).parse().unwrap()
    }

    fn open(&self) -> Result<OpenedDevice, Error> {
        self.opener().open(&self.mirror_uri()).map_err(Error::environment)
    }

    /// The devices, opened once and shared: a process opens a file only once.
    pub(super) fn open_legs(&self) -> Vec<MirrorLegDevice> {
        let OpenedLegs { legs, .. } = open_legs(&self.opener(), self.mirror_uri().children());
        legs
    }

    pub(super) fn open_on_legs(
        &self,
        legs: &[MirrorLegDevice],
        options: &MirrorOptions,
    ) -> Result<Mirror, Error> {
        Mirror::open(&self.regions, legs, options, &mut || self.clock.now())
    }

    fn read_superblocks(&self, legs: &[MirrorLegDevice]) -> Vec<MirrorSuperblock> {
        let found = read_leg_candidates(&self.regions, legs, &mut || self.clock.now()).unwrap();
        let leg = |LegCandidate { found, .. }| match found {
            LegReadResult::Leg(leg) => *leg,
            other => panic!("{other:?}"),
        };
        found.into_iter().map(leg).collect()
    }

    pub(super) fn write(&self, channel: &mut dyn IoChannel, lba: u64) -> IoStatus {
        let memory = self.regions.allocate_region(512).unwrap();
        let segment = Segment { len_bytes: 512, ..memory.segment() };
        let operation = Operation::Write;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        assert_eq!(channel.submit(self.clock.now(), &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            channel.flush_submissions();
            channel.poll(self.clock.now(), &mut completions);
        }
        completions.as_slice()[0].status
    }
}

#[test]
fn second_open_is_rejected_with_the_owners_identity() {
    let bench = OwnershipFixture::new();
    let legs = bench.open_legs();
    let first = bench.open_on_legs(&legs, &MirrorOptions::default()).unwrap();
    let refused = bench.open_on_legs(&legs, &MirrorOptions::default()).unwrap_err();
    let expected = format!(": process {} on host `", std::process::id());
    assert!(refused.text.contains(&expected) && refused.text.contains("` since 20"), "{refused}");
    assert!(refused.text.contains("takeover --force"), "{refused}");
    drop(first);
    assert!(bench.open_on_legs(&legs, &MirrorOptions::default()).is_ok(), "the first is gone");
}

#[test]
fn mirror_has_no_owner_after_its_last_channel_closes() {
    let bench = OwnershipFixture::new();
    let opened = bench.open().unwrap();
    let mut channel = opened.medium.channel().unwrap();
    assert_eq!(bench.write(&mut *channel, 7), IoStatus::SUCCESS);
    drop(opened);
    assert_eq!(bench.write(&mut *channel, 3_000), IoStatus::SUCCESS, "a channel keeps it");
    drop(channel);
    let found = bench.read_superblocks(&bench.open_legs());
    assert!(found.iter().all(|leg| leg.owner.id == 0 && leg.owner.epoch == 1), "{found:?}");
}

/// Outcome of a write by the former owner, and whether the legs then still record the new owner.
fn outcome_of_write_by_former_owner(bugs: InjectedBugs) -> (IoStatus, bool) {
    let bench = OwnershipFixture::new();
    let legs = bench.open_legs();
    let former = bench.open_on_legs(&legs, &MirrorOptions { bugs, ..MirrorOptions::default() });
    let former = former.unwrap();
    let mut old = former.channel().unwrap();
    assert_eq!(bench.write(&mut *old, 0), IoStatus::SUCCESS);
    let force = MirrorOptions { force: true, ..MirrorOptions::default() };
    let owner = bench.open_on_legs(&legs, &force).unwrap();
    let mine = owner.shared.lock().fence.writes.id;
    // Another region, which has to be marked dirty first.
    let status = bench.write(&mut *old, 3_000);
    if status == RESERVATION_CONFLICT {
        assert_eq!(bench.write(&mut *old, 0), RESERVATION_CONFLICT, "from then on nothing");
        assert!(former.block_status(0).is_err());
        let mut new = owner.channel().unwrap();
        assert_eq!(bench.write(&mut *new, 3_000), IoStatus::SUCCESS);
    }
    let is_mine = bench.read_superblocks(&legs).iter().all(|leg| leg.owner.id == mine);
    (status, is_mine)
}

#[test]
fn former_owner_stops_writing_after_the_takeover() {
    assert_eq!(
        outcome_of_write_by_former_owner(InjectedBugs::default()),
        (RESERVATION_CONFLICT, true)
    );
    let bugs = InjectedBugs { ignores_fence: true, ..InjectedBugs::default() };
    let (status, _) = outcome_of_write_by_former_owner(bugs);
    assert_eq!(status, IoStatus::SUCCESS, "the injected bug");
}

#[test]
fn forced_takeover_succeeds_with_an_unknown_owner() {
    let bench = OwnershipFixture::new();
    let legs = bench.open_legs();
    let mut elsewhere = crate::owner_identity::RegisteredOwner::for_this_process().owner_record();
    elsewhere.record.boot += 1;
    elsewhere.record.machine += 1;
    let options = MirrorOptions { opener: Some(elsewhere), ..MirrorOptions::default() };
    drop(bench.open_on_legs(&legs, &options).unwrap());
    drop(legs);
    let refused = bench.open().unwrap_err();
    assert!(refused.text.contains("has it open for writing"), "{refused}");
    let opener = bench.opener();
    assert!(take_over_mirror(&opener, &bench.mirror_uri(), false).is_err());
    let former = take_over_mirror(&opener, &bench.mirror_uri(), true).unwrap();
    assert_eq!(former, Some(elsewhere.to_string()));
    assert_eq!(take_over_mirror(&opener, &bench.mirror_uri(), false), Ok(None));
    let legs = bench.read_superblocks(&bench.open_legs());
    assert!(legs.iter().all(|leg| leg.owner.id == 0 && leg.sequence > 1 << 20), "{legs:?}");
    assert!(bench.open().is_ok());
}

#[test]
fn open_mirror_is_not_recreated_or_changed() {
    let bench = OwnershipFixture::new();
    let legs = bench.open_legs();
    let mut elsewhere = crate::owner_identity::RegisteredOwner::for_this_process().owner_record();
    elsewhere.record.boot = 0;
    let options = MirrorOptions { opener: Some(elsewhere), ..MirrorOptions::default() };
    drop(bench.open_on_legs(&legs, &options).unwrap());
    drop(legs);
    let uris = ["a", "b"].map(|name| bench.leg_uri(name, ""));
    let refused = create_mirror(&bench.opener(), &uris, true).unwrap_err().to_string();
    assert!(refused.contains("has it open for writing"), "{refused}");
    let new = bench.leg_uri("c", "&size=4m");
    let refused =
        crate::mirror::add_leg(&bench.opener(), &bench.mirror_uri(), &new, true).unwrap_err();
    assert!(refused.to_string().contains("has it open for writing"), "{refused}");
}

#[test]
fn stale_leg_with_an_old_owner_record_is_ignored() {
    let bench = OwnershipFixture::new();
    let legs = bench.open_legs();
    let stays = crate::owner_identity::RegisteredOwner::for_this_process();
    let options = MirrorOptions { opener: Some(stays.owner_record()), ..MirrorOptions::default() };
    let mirror = bench.open_on_legs(&legs, &options).unwrap();
    let shared = std::sync::Arc::clone(&mirror.shared);
    let mut channel = mirror.channel().unwrap();
    // It is not looked for before the others have recorded the release.
    shared.lock().times.probe_at = Instant::NEVER;
    shared.lock().fail_legs(&shared, 0b10);
    assert!(shared.lock().release_ownership());
    while !shared.lock().has_no_pending_commit() {
        channel.poll(bench.clock.now(), &mut CompletionBatch::with_capacity(1));
        channel.flush_submissions();
        let _ = bench.write(&mut *channel, 0);
    }
    let ids: Vec<_> = bench.read_superblocks(&legs).iter().map(|leg| leg.owner.id).collect();
    assert_eq!(ids, [0, stays.owner_record().id]);
    drop((channel, mirror, shared));
    // The process still runs, and has closed the mirror.
    let _stays = crate::owner_identity::RegisteredOwner::from_record(stays.owner_record());
    let elsewhere = crate::owner_identity::RegisteredOwner::for_this_process();
    let options =
        MirrorOptions { opener: Some(elsewhere.owner_record()), ..MirrorOptions::default() };
    bench.open_on_legs(&legs, &options).unwrap();
}
