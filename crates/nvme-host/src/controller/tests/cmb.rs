//! Rings in the controller memory buffer: both styles, invalid registers, resets.

use tenmil_base::{IoStatus, Span};
use tenmil_wire::Status;

use super::scripted_device::DeviceState;
use super::shared_memory::BAR;
use super::{ControllerHarness, short_timeout_options};
use crate::fast_path_options::FastPathOptions;
use crate::{
    CmbMode, CmbUnavailable, ControllerOptions, ControllerState, Event, QueuePairOptions,
    RequestError,
};

/// Pages of 4 KiB from the third page of BAR 2 on: a ring of 16 entries uses one.
const LOCATION: u32 = 2 << 12 | 2;
const QUEUES: u32 = 1;
/// CAP.CMBS.
const HAS_CONTROL: u64 = 1 << 57;

fn cmbsz_of_pages(count: u32) -> u32 {
    count << 12
}

fn options_with_cmb(memory_buffer: CmbMode) -> ControllerOptions {
    ControllerOptions { memory_buffer, ..short_timeout_options() }
}

/// A started harness, with a buffer of `count` pages and a BAR of the same size.
fn harness_with_cmb(
    count: u32,
    use_of: CmbMode,
    change: impl FnOnce(&mut DeviceState),
) -> ControllerHarness {
    ControllerHarness::with_device(options_with_cmb(use_of), |state| {
        state.memory.set_bar((2 + count as usize) * 4096);
        state.cmb = [LOCATION, cmbsz_of_pages(count) | QUEUES];
        change(state);
    })
}

fn ready_harness_with_cmb(count: u32, change: impl FnOnce(&mut DeviceState)) -> ControllerHarness {
    let mut harness = harness_with_cmb(count, CmbMode::SubmissionQueues, change);
    harness.run_until(|event| *event == Event::Ready);
    harness
}

/// The two styles: before NVMe 1.4, and since.
const STYLES: [u64; 2] = [0, HAS_CONTROL];

/// Executes `count` commands on a queue pair, and checks that.
fn run_commands_on_pair(harness: &mut ControllerHarness, pair: usize, count: u64) {
    let before = harness.pairs[pair].1.len();
    for token in 0..count {
        harness.submit_io(pair, token);
        harness.run_for(Span::from_ms(1));
    }
    let ended = harness.pairs[pair].1[before..].iter().map(|it| (it.token, it.status));
    assert!(ended.eq((0..count).map(|token| (token, IoStatus::SUCCESS))));
    assert_eq!(harness.device.state().faults, []);
}

fn rings_in_host_memory(harness: &ControllerHarness) -> Vec<(u16, CmbUnavailable)> {
    let found = harness.events_without_times().into_iter().filter_map(|event| match event {
        Event::RingInHostMemory { id, why } => Some((id, why)),
        _ => None,
    });
    found.collect()
}

/// Final error of a controller that never becomes ready.
fn final_error(mut harness: ControllerHarness) -> String {
    harness.run_until(|event| matches!(event, Event::Dead(_) | Event::Ready));
    match harness.events_without_times().pop() {
        Some(Event::Dead(error)) => {
            assert!(harness.memory.is_dma_revoked());
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn submission_rings_are_placed_in_the_cmb_of_either_style() {
    for style in STYLES {
        let mut harness = ready_harness_with_cmb(4, |state| state.cap |= style);
        let allocations = harness.memory.allocation_count();
        for id in [1, 2] {
            assert_eq!(harness.create_queue_pair(None), id);
        }
        assert_eq!(harness.memory.allocation_count(), allocations + 2, "completion rings only");
        // More than one wrap of 16 entries.
        for (pair, count) in [(0, 40), (1, 7)] {
            run_commands_on_pair(&mut harness, pair, count);
            assert_eq!(harness.pairs[pair].0.stats().cmb_commands, count);
            assert!(harness.pairs[pair].0.transport().memory().is_in_device);
        }
        assert_eq!(rings_in_host_memory(&harness), []);
        let part = tenmil_base::BarRange { bar: 2, offset: 2 * 4096, len_bytes: 4 * 4096 };
        assert_eq!(harness.memory.mapped_bar_ranges(), [part]);
        let state = harness.device.state();
        assert_eq!(state.cmb_commands, 47);
        assert!(state.cmb_queues.iter().eq(&[1, 2]));
        let reported = if style == 0 { 0 } else { (BAR + 2 * 4096) | 3 };
        assert_eq!(state.cmbmsc, reported, "CRE, CMSE and the address of the BAR");
    }
}

#[test]
fn a_ring_is_zeroed_before_it_is_used() {
    let mut harness = ready_harness_with_cmb(1, |_| {});
    harness.create_queue_pair(None);
    let mut ring = [1; 16 * 64];
    assert!(harness.memory.bar_load(2 * 4096, &mut ring));
    assert_eq!(ring, [0; 16 * 64]);
}

#[test]
fn unused_cmb_is_not_enabled() {
    // The setting of another driver is cleared, so that host memory may have that address.
    for (use_of, found) in [(CmbMode::Ignored, 0x5003), (CmbMode::Enabled, 1)] {
        let mut harness = harness_with_cmb(4, use_of, |state| {
            state.cap |= HAS_CONTROL;
            state.cmbmsc = 0x5003;
        });
        harness.run_until(|event| *event == Event::Ready);
        harness.create_queue_pair(None);
        run_commands_on_pair(&mut harness, 0, 3);
        assert_eq!(harness.pairs[0].0.stats().cmb_commands, 0);
        assert_eq!(
            (rings_in_host_memory(&harness), harness.memory.mapped_bar_ranges()),
            (vec![], vec![])
        );
        let state = harness.device.state();
        assert_eq!((state.cmbmsc, state.cmb_reads, state.cmb_commands), (found, 0, 0));
    }
    let mut old = harness_with_cmb(4, CmbMode::Enabled, |_| {});
    old.run_until(|event| *event == Event::Ready);
    assert_eq!(old.device.state().cmbmsc, 0, "before 1.4 there is nothing to write");
}

#[test]
fn without_usable_cmb_rings_are_in_host_memory_and_it_is_reported() {
    type Change = fn(&mut DeviceState);
    let cases: [(Change, CmbUnavailable, &str); 4] = [
        (|state| state.cmb = [0; 2], CmbUnavailable::Absent, "no controller memory buffer"),
        (|state| state.cmb[1] &= !QUEUES, CmbUnavailable::NoQueues, "CMBSZ.SQS is 0"),
        (
            |state| state.memory.set_bar_unusable("it belongs to another driver"),
            CmbUnavailable::Unusable { why: "it belongs to another driver" },
            "of no use: it belongs to another driver",
        ),
        (
            |state| state.refuses_address = true,
            CmbUnavailable::AddressRefused { address: BAR + 2 * 4096 },
            "does not take 0x8fe802000 for its memory buffer (CMBSTS.CBAI is 1)",
        ),
    ];
    for (change, why, text) in cases {
        let mut harness = ready_harness_with_cmb(4, |state| {
            state.cap |= HAS_CONTROL;
            change(state);
        });
        harness.create_queue_pair(None);
        assert_eq!(rings_in_host_memory(&harness), [(1, why)]);
        assert!(why.to_string().contains(text), "{why}");
        run_commands_on_pair(&mut harness, 0, 20);
        assert_eq!(harness.pairs[0].0.stats().cmb_commands, 0);
        assert_eq!(harness.device.state().cmbmsc, 1, "no address is the buffer's");
        // A reset does not change it.
        harness.controller.reset(harness.now).unwrap();
        harness.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
        run_commands_on_pair(&mut harness, 0, 20);
        assert_eq!(harness.device.state().cmb_commands, 0);
    }
}

#[test]
fn rings_that_do_not_fit_use_host_memory_until_cmb_is_released() {
    let mut harness = ready_harness_with_cmb(2, |state| state.cap |= HAS_CONTROL);
    let allocations = harness.memory.allocation_count();
    for id in [1, 2, 3] {
        assert_eq!(harness.create_queue_pair(None), id);
    }
    let no_room = |free_bytes, len_bytes| CmbUnavailable::Full { free_bytes, len_bytes };
    assert_eq!(rings_in_host_memory(&harness), [(3, no_room(0, 1024))]);
    (0..3).for_each(|pair| run_commands_on_pair(&mut harness, pair, 20));
    assert!(harness.device.state().cmb_queues.iter().eq(&[1, 2]));

    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    harness.run_for(Span::from_ms(20));
    drop(harness.pairs.remove(0));
    assert_eq!(harness.create_queue_pair(None), 1);
    run_commands_on_pair(&mut harness, 2, 20);
    assert_eq!(harness.pairs[2].0.stats().cmb_commands, 20, "the room of the one before");
    assert_eq!(rings_in_host_memory(&harness).len(), 1);

    // A ring of 256 entries uses four pages.
    let deep =
        QueuePairOptions { depth: 256, vector: None, techniques: FastPathOptions::default() };
    harness.controller.create_queue_pair(harness.now, deep).unwrap();
    harness.run_until(|event| *event == Event::QueuePairCreated { id: 4 });
    assert_eq!(rings_in_host_memory(&harness)[1], (4, no_room(0, 16384)));

    harness.controller.start_shutdown(harness.now, crate::ShutdownNotification::Normal).unwrap();
    harness.run_until(|event| matches!(event, Event::ShutDown { .. }));
    harness.run_for(Span::from_ms(20));
    assert!(
        harness.memory.allocation_count() <= allocations,
        "completion rings are given back, too"
    );
}

#[test]
fn cmb_pages_are_not_reused_while_the_queue_may_write_them() {
    let mut harness = ready_harness_with_cmb(1, |_| {});
    harness.create_queue_pair(None);
    harness.polls_pairs = false;
    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert_eq!(harness.create_queue_pair(None), 1);
    assert_eq!(rings_in_host_memory(&harness).len(), 1);
    harness.polls_pairs = true;
    harness.run_for(Span::from_ms(20));
    harness.create_queue_pair(None);
    assert_eq!(rings_in_host_memory(&harness).len(), 1, "by now it has let go");
}

#[test]
fn queue_rejected_in_the_cmb_releases_its_pages() {
    let mut harness = ready_harness_with_cmb(1, |_| {});
    for opcode in [0x05, 0x01] {
        let status = Status::INVALID_USE_OF_CMB;
        harness.device.state().refuse = [(opcode, status)].into();
        let options =
            QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
        let id = harness.controller.create_queue_pair(harness.now, options).unwrap();
        harness.run_until(|event| *event == Event::QueuePairRefused { id, status });
        harness.device.state().refuse.clear();
    }
    harness.create_queue_pair(None);
    run_commands_on_pair(&mut harness, 0, 5);
    assert_eq!((rings_in_host_memory(&harness), harness.device.state().cmb_commands), (vec![], 5));
}

#[test]
fn cmb_pages_are_released_if_completion_memory_is_missing() {
    let mut harness = ready_harness_with_cmb(1, |_| {});
    let options =
        QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
    harness.memory.set_limit(Some(0));
    let refused = harness.controller.create_queue_pair(harness.now, options);
    assert_eq!(refused, Err(RequestError::Memory { len_bytes: 16 * 80 }));
    harness.memory.set_limit(None);
    harness.create_queue_pair(None);
    assert_eq!(rings_in_host_memory(&harness), []);
}

/// Doorbells 2 KiB apart: those of the first queue pair do not fit into a page of shadow doorbells.
#[test]
fn queue_pair_without_doorbells_allocates_nothing() {
    let wanted =
        ControllerOptions { shadow_doorbells: true, ..options_with_cmb(CmbMode::SubmissionQueues) };
    let mut harness = ControllerHarness::ready_with(wanted, |state| {
        state.memory.set_bar(3 * 4096);
        state.cmb = [LOCATION, cmbsz_of_pages(1) | QUEUES];
        state.cap |= 9 << 32;
        state.identity.push((256, vec![0, 1])); // OACS: doorbell buffer
        state.has_shadows = true;
    });
    let allocations = harness.memory.allocation_count();
    let options =
        QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
    for _ in 0..3 {
        let refused = harness.controller.create_queue_pair(harness.now, options);
        assert_eq!(refused, Err(RequestError::NoSuchQueue { id: 1 }));
        assert_eq!(harness.memory.allocation_count(), allocations);
    }
}

#[test]
fn invalid_cmb_registers_are_rejected_by_name() {
    let of = |location: u32, size: u32| {
        STYLES.map(|style| {
            final_error(harness_with_cmb(4, CmbMode::SubmissionQueues, |state| {
                state.cap |= style;
                state.cmb = [location, size | QUEUES];
            }))
        })
    };
    let both = |text: &str| [text.to_owned(), text.to_owned()];
    assert_eq!(of(6, cmbsz_of_pages(4)), both("CMBLOC.BIR is 0x6, expected 0 or 2 to 5"));
    let units = "CMBSZ.SZU is 0xf, expected at most 6: units of 64 GiB";
    assert_eq!(of(LOCATION, cmbsz_of_pages(1) | 0xf00), both(units));
    let outside = |end: u64, bar: u8, bytes: u32| {
        both(&format!(
            "CMBLOC and CMBSZ: the controller memory buffer ends at byte {end} of BAR {bar}, \
             expected at most {bytes}"
        ))
    };
    assert_eq!(of(LOCATION, cmbsz_of_pages(5)), outside(7 * 4096, 2, 6 * 4096));
    assert_eq!(of(LOCATION & !7 | 4, cmbsz_of_pages(1)), outside(3 * 4096, 4, 0));
    let far = (0xf_ffff << 36) + (0xf_ffff << 36);
    assert_eq!(of(0xffff_f002, 0xffff_f600), outside(far, 2, 6 * 4096));
}

#[test]
fn unplug_while_reading_cmb_registers_is_removal() {
    let reads = ready_harness_with_cmb(4, |state| state.cap |= HAS_CONTROL).device.state().reads;
    let mut removed = 0;
    for unplugged_at_read in reads - 4..=reads {
        let mut harness = harness_with_cmb(4, CmbMode::SubmissionQueues, |state| {
            state.cap |= HAS_CONTROL;
            state.unplugged_at_read = unplugged_at_read;
        });
        harness.run_until(|event| matches!(event, Event::Removed | Event::Ready));
        removed += u32::from(harness.events_without_times().last() == Some(&Event::Removed));
    }
    assert!(removed >= 3, "CMBSZ, CMBLOC, CMBSTS: {removed}");
}

#[test]
fn rings_keep_their_location_after_any_reset() {
    for style in STYLES {
        let mut harness = ready_harness_with_cmb(1, |state| state.cap |= style);
        harness.create_queue_pair(None);
        run_commands_on_pair(&mut harness, 0, 5);
        // The second also clears CMBMSC.
        for round in [1, 2] {
            match round {
                1 => harness.controller.reset(harness.now).unwrap(),
                _ => harness.controller.reset_subsystem(harness.now).unwrap(),
            }
            harness.events.clear();
            harness.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
            run_commands_on_pair(&mut harness, 0, 20);
            assert_eq!(harness.device.state().cmb_commands, 5 + round * 20);
        }
        assert_eq!(harness.memory.mapped_bar_ranges().len(), 1, "it is mapped once");
        assert_eq!(rings_in_host_memory(&harness), []);
    }
}

#[test]
fn commands_in_flight_at_a_reset_complete_and_are_not_repeated() {
    let mut harness = ready_harness_with_cmb(1, |state| state.cap |= HAS_CONTROL);
    harness.create_queue_pair(None);
    harness.device.state().answers_io = false;
    for token in 0..6 {
        harness.submit_io(0, token);
    }
    harness.run_for(Span::from_ms(1));
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
    harness.device.state().answers_io = true;
    harness.run_for(Span::from_ms(20));
    let ended = harness.pairs[0].1.iter().map(|it| (it.token, it.status));
    assert!(ended.eq((0..6).map(|token| (token, IoStatus::ABORTED_BY_HOST))));
    assert_eq!(harness.device.state().cmb_commands, 6);
}

#[test]
fn cmb_changed_after_a_reset_is_fatal() {
    type Change = fn(&mut DeviceState);
    let cases: [(Change, &str); 3] = [
        (|state| state.cmb[0] = 1 << 12 | 2, "CMBLOC and CMBSZ above it is"),
        (|state| state.cmb[1] = 0, "as queues lie there"),
        (|state| state.refuses_address = true, "CMBMSC.CBA is 0x8fe802000, expected to be taken"),
    ];
    for (change, text) in cases {
        let mut harness = ready_harness_with_cmb(2, |state| state.cap |= HAS_CONTROL);
        harness.create_queue_pair(None);
        run_commands_on_pair(&mut harness, 0, 3);
        change(&mut harness.device.state());
        harness.controller.reset(harness.now).unwrap();
        harness.run_until(|event| matches!(event, Event::Dead(_)));
        let Some(Event::Dead(error)) = harness.events_without_times().pop() else {
            panic!("{:?}", harness.events_without_times())
        };
        assert!(error.to_string().contains(text), "{error}");
        harness.assert_state(ControllerState::Dead);
        assert_eq!(harness.device.state().cmb_commands, 3);
    }
}
