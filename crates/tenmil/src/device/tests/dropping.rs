//! Dropped futures: their memory is not reused before the device has completed the request.

use tenmil_base::Random;

use super::{BLOCK, PAGE, PolledOperation, TestReactor};
use crate::device::Buffer;

#[test]
fn future_may_be_dropped_at_any_point() {
    // Dropped after a number of polls and iterations, completed after a number of iterations:
    // before, between, after.
    for dropped in 0..6 {
        for completed in 0..6 {
            let mut stand = TestReactor::new(4, 4, 4);
            let baseline = stand.free_bytes();
            let mut op = Some(stand.start_read(0, stand.buffer()));
            for step in 0..8 {
                if step == dropped {
                    op = None;
                }
                if step == completed {
                    stand.slow.complete_all();
                }
                let ended = op.as_mut().and_then(PolledOperation::poll);
                if ended.is_some() {
                    op = None;
                }
                stand.run_iterations(1);
                let held = stand.slow.held_request_count() as u64;
                assert!(stand.free_bytes() <= baseline - held * u64::from(PAGE), "in use and free");
            }
            stand.slow.complete_all();
            stand.run_iterations(3);
            drop(op);
            assert_eq!(stand.free_bytes(), baseline, "dropped {dropped}, answered {completed}");
        }
    }
}

#[test]
fn buffers_of_dropped_futures_return_to_the_pool_on_completion() {
    let mut stand = TestReactor::new(16, 16, 16);
    let baseline = stand.free_bytes();
    let mut ops: Vec<PolledOperation> =
        (0..16).map(|lba| stand.start_read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.run_iterations(2);
    assert_eq!(stand.slow.held_request_count(), 16);
    drop(ops);
    stand.run_iterations(10);
    assert_eq!(stand.free_bytes(), 0);
    assert!(stand.device.buffer(BLOCK).is_err(), "the device may touch all of it");
    for index in 1..=16_u64 {
        stand.slow.complete_request(0);
        stand.run_iterations(2);
        assert_eq!(stand.free_bytes(), index * u64::from(PAGE));
    }
    assert_eq!(stand.free_bytes(), baseline);
    let mut again = stand.start_read(99, stand.buffer());
    assert!(again.poll().is_none());
    stand.run_iterations(2);
    stand.slow.complete_all();
    stand.run_iterations(2);
    assert!(again.poll().is_some_and(|ended| ended.is_ok()), "the places are free again too");
}

/// Starts, drops and completes operations at random, with a device that is often full and a pool
/// that is often empty. At the end all operations are completed.
fn run_random_drops(seed: u64) -> usize {
    let mut random = Random::new(seed);
    let mut draw = |bound: usize| usize::try_from(random.below(bound.max(1) as u64)).unwrap();
    let (depth, room) = (1 + draw(6), 1 + draw(6));
    let mut stand = TestReactor::new(u32::try_from(depth).unwrap(), room, 12);
    let baseline = stand.free_bytes();
    let mut ops: Vec<PolledOperation> = Vec::new();
    let mut ended = 0;
    let mut idle: Vec<Buffer> = Vec::new();
    for lba in 0..300 {
        match draw(6) {
            0 | 1 => {
                let buffer = idle.pop().or_else(|| stand.device.buffer(BLOCK).ok());
                if let Some(mut buffer) = buffer {
                    // Another owner of the memory would detect this.
                    buffer.store(0, &[0xee; BLOCK as usize]);
                    ops.push(stand.start_read(lba, buffer));
                }
            }
            2 if !ops.is_empty() => drop(ops.swap_remove(draw(ops.len()))),
            3 if stand.slow.held_request_count() > 0 => {
                stand.slow.complete_request(draw(stand.slow.held_request_count()))
            }
            4 => drop(stand.run_iterations(1)),
            _ => {
                for index in (0..ops.len()).rev() {
                    if let Some(result) = ops[index].poll() {
                        ended += 1;
                        drop(ops.swap_remove(index));
                        idle.extend(result.ok());
                    }
                }
            }
        }
    }
    for _ in 0..600 {
        stand.slow.complete_all();
        stand.run_iterations(1);
        ops.retain_mut(|op| op.poll().is_none_or(|result| result.is_err()));
    }
    assert!(ops.is_empty(), "seed {seed}: {} have been forgotten", ops.len());
    idle.clear();
    assert_eq!(stand.free_bytes(), baseline, "seed {seed}");
    assert!(stand.run_until_asleep(), "seed {seed}: something is left to do");
    ended
}

#[test]
fn no_memory_is_reused_while_a_device_may_access_it() {
    let seeds = if cfg!(miri) { 2 } else { 1_000 };
    let ended: usize = (0..seeds).map(run_random_drops).sum();
    assert!(ended > 10 * usize::try_from(seeds).unwrap(), "too few to tell: {ended}");
}
