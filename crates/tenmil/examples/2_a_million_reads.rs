//! One million 4 KiB reads on one thread at depth 128, with the polled interface below the futures.
//! Nothing here waits, allocates or locks; the caller decides when the device is polled.

use std::error::Error;

use tenmil_base::{CompletionBatch, IoStatus, Operation, Random, Request, Segment};
use tenmil_block::Opener;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

const READS: u64 = 1_000_000;
const BYTES: u32 = 4096;
const DEPTH: u32 = 128;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // Memory for DMA is identified by region number and offset, never by pointer.
    let (clock, regions) = (Clock::start(), RegionTable::new(256));
    let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil::KINDS };
    let ssd = opener.open(&"emu:null".parse()?)?;
    println!("{}", ssd.description);
    // A channel belongs to one thread. Here it is a queue pair of the controller.
    let mut channel = ssd.medium.channel()?;
    let blocks = BYTES / channel.limits().block_size;
    let places = channel.limits().block_count / u64::from(blocks);

    let memory = regions.allocate((DEPTH * BYTES) as usize)?;
    let piece = |number| memory.segment().slice(number * BYTES, BYTES);
    let segments: Vec<Segment> = (0..DEPTH).filter_map(piece).collect();
    let mut random = Random::new(1);
    // The token comes back with the completion and identifies the buffer that is free again.
    let mut read = |place: u32| Request {
        token: place.into(),
        lba: random.below(places) * u64::from(blocks),
        blocks,
        operation: Operation::Read,
        segment_first: place,
        segment_count: 1,
        ..Request::PLACEHOLDER
    };

    let mut waiting: Vec<Request> = (0..DEPTH).map(&mut read).collect();
    let mut answers = CompletionBatch::with_capacity(DEPTH as usize);
    let (begun, mut asked, mut done) = (clock.now(), waiting.len() as u64, 0);
    while done < READS {
        let now = clock.now();
        let taken = channel.submit(now, &waiting, &segments);
        waiting.drain(..taken);
        // One doorbell write for all of them.
        channel.flush();
        done += channel.poll(now, &mut answers) as u64;
        for answer in answers.drain() {
            assert_eq!(answer.status, IoStatus::SUCCESS);
            if asked < READS {
                asked += 1;
                waiting.push(read(u32::try_from(answer.token)?));
            }
        }
    }
    let seconds = clock.now().since(begun).as_secs_f64();
    println!("{done} reads in {seconds:.3} s; `tenmil perf` says what that is worth");
    Ok(())
}
