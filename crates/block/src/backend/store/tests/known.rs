//! Reads of which the store is not asked, because their channel knows where the blocks lie.

use std::sync::Arc;

use base::{
    Answers, Backend, Flags, Instant, Memory, Operation, Outcome, Random, Request, Segment,
};
use dma::Regions;

use super::super::{Change, OpenStore, Place, create};
use crate::backend::conformance::Reluctant;
use crate::{Kind, MediumError, Opened, Opener, Ram, uri::Uri};

const PAGE: u32 = 4096;
const BLOCKS: u64 = 64;

/// Opens `scarce:`, memory that takes little at a time.
struct Scarce(Arc<Reluctant>);

impl Kind for Scarce {
    fn open(&self, _opener: &Opener<'_>, _uri: &Uri) -> Result<Opened, MediumError> {
        Ok(Opened::fresh(self.0.clone(), "memory that takes little"))
    }
}

/// A volume and its store, whose blocks were written, each with its number, and who knows them all.
struct Bench {
    backend: Box<dyn Backend>,
    memory: dma::Region,
    open: Arc<OpenStore>,
}

fn bench(regions: &Regions, seed: u64) -> Bench {
    let ram = Arc::new(Ram::new(regions, 512, 8 * 2048).unwrap());
    let scarce = Scarce(Arc::new(Reluctant::new(ram, seed)));
    let more: &[(&str, &dyn Kind)] = &[("scarce", &scarce)];
    let opener = Opener { regions, clock: host::Clock::start(), seed, more };
    let device: Uri = "scarce:".parse().unwrap();
    create(&opener, &device, "tests", false).unwrap();
    let place = Place::on(&device);
    let open = OpenStore::open(&opener, &place).unwrap();
    let name = "v".into();
    let change = Change::Create { name, blocks: BLOCKS, unit: 4, uuid: 1, checksums: false };
    open.change(change).unwrap();
    let opened = opener.open(&place.with_name("v")).unwrap();
    let memory = regions.allocate(1 << 20).unwrap();
    let mut backend = opened.medium.channel().unwrap();
    for block in 0..BLOCKS {
        let page = memory.segment().slice(0, PAGE).unwrap();
        regions.fill(page, u8::try_from(block + 1).unwrap()).unwrap();
        let requests = [request(Operation::Write, block, 0..1)];
        assert!(ask(&mut *backend, &requests, &[page])[0].1.is_success());
        // Once through the store, which is how a channel learns.
        let requests = [request(Operation::Read, block, 0..1)];
        assert!(ask(&mut *backend, &requests, &[page])[0].1.is_success());
    }
    Bench { backend, memory, open }
}

fn request(operation: Operation, lba: u64, segments: std::ops::Range<u32>) -> Request {
    let segment_count = u16::try_from(segments.len()).unwrap();
    Request {
        token: 1_000 + lba,
        lba,
        blocks: 1,
        segment_first: segments.start,
        segment_count,
        operation,
        flags: Flags::NONE,
        ..Request::NOTHING
    }
}

/// Tokens and outcomes, in the order of the tokens. The segments are gone when all is submitted.
fn ask(
    backend: &mut dyn Backend,
    requests: &[Request],
    segments: &[Segment],
) -> Vec<(u64, Outcome)> {
    let (mut answers, mut done, mut taken) = (Answers::with_capacity(5), Vec::new(), 0);
    for turn in 0..100_000 {
        let now = Instant { ns: turn };
        let lent = segments.to_vec();
        taken += backend.submit(now, &requests[taken..], &lent);
        backend.flush();
        backend.poll(now, &mut answers);
        done.extend(answers.drain().map(|answer| (answer.token, answer.outcome)));
        if done.len() == requests.len() {
            done.sort_unstable_by_key(|(token, _)| *token);
            return done;
        }
        host::thread::give_way();
    }
    panic!("{} of {} are answered", done.len(), requests.len());
}

#[test]
fn known_reads_bring_each_its_own_block_from_a_device_that_takes_few_at_a_time() {
    for seed in 0..8 {
        let regions = Regions::new(16);
        let Bench { mut backend, memory, open } = bench(&regions, seed);
        let mut random = Random::new(seed);
        for _ in 0..40 {
            regions.fill(memory.segment(), 0xee).unwrap();
            // Two segments each, in any order and with some that nobody names before them.
            let mut lbas: Vec<u64> = (0..BLOCKS).filter(|_| random.chance(1, 2)).collect();
            lbas.sort_by_cached_key(|_| random.draw());
            let mut segments = vec![Segment::default(); 3];
            let mut requests = Vec::new();
            for lba in lbas {
                let page =
                    memory.segment().slice(u32::try_from(lba).unwrap() * PAGE, PAGE).unwrap();
                let (first, cut) =
                    (segments.len(), 512 * u32::try_from(1 + random.below(7)).unwrap());
                segments.push(page.slice(0, cut).unwrap());
                segments.push(page.slice(cut, PAGE - cut).unwrap());
                let first = u32::try_from(first).unwrap();
                requests.push(request(Operation::Read, lba, first..first + 2));
            }
            let done = ask(&mut *backend, &requests, &segments);
            assert!(done.iter().all(|(_, outcome)| outcome.is_success()), "seed {seed}: {done:?}");
            requests.sort_unstable_by_key(|request| request.token);
            assert!(done.iter().map(|(token, _)| *token).eq(requests.iter().map(|one| one.token)));
            for block in 0..BLOCKS {
                let at = u32::try_from(block).unwrap() * PAGE;
                let mut bytes = vec![0; PAGE as usize];
                regions.load(memory.segment().slice(at, PAGE).unwrap(), &mut bytes).unwrap();
                let was_read = requests.iter().any(|request| request.lba == block);
                let expected = if was_read { u8::try_from(block + 1).unwrap() } else { 0xee };
                assert!(bytes.iter().all(|byte| *byte == expected), "seed {seed}, block {block}");
            }
            assert!(!open.shared.lock().is_busy(), "nobody reads any more");
        }
    }
}

#[test]
fn memory_that_does_not_fit_a_known_read_is_refused_now_and_later() {
    let regions = Regions::new(16);
    let Bench { mut backend, memory, open } = bench(&regions, 3);
    let page = memory.segment().slice(0, PAGE).unwrap();
    // More small ones than there may be in a request.
    let mut segments = vec![page.slice(0, 512).unwrap(); 2_000];
    segments[0] = page;
    for _ in 0..50 {
        let none = request(Operation::Read, 0, 2_000..2_001);
        let short = request(Operation::Read, 1, 1..2);
        let long = Request { blocks: 1 << 20, ..request(Operation::Read, 2, 0..1) };
        let many = request(Operation::Read, 7, 0..2_000);
        let fine = (3..12).filter(|lba| *lba != 7).map(|lba| request(Operation::Read, lba, 0..1));
        let mut requests = vec![none, short, long];
        requests.extend(fine);
        requests.insert(7, many);
        let done = ask(&mut *backend, &requests, &segments);
        for (token, outcome) in done {
            let is_fine = !matches!(token - 1_000, 0 | 1 | 2 | 7);
            assert_eq!(outcome.is_success(), is_fine, "{token}: {outcome:?}");
        }
        assert!(!open.shared.lock().is_busy(), "nobody reads any more");
    }
}
