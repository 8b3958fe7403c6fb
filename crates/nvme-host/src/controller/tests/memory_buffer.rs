//! Rings in the controller memory buffer: both styles, invalid registers, resets.

use tenmil_base::{IoStatus, Span};
use tenmil_wire::Status;

use super::device::Script;
use super::memory::BAR;
use super::{World, options};
use crate::fast_path::FastPathOptions;
use crate::{
    CmbMode, CmbUnavailable, ControllerOptions, Event, QueuePairOptions, RequestError, State,
};

/// Pages of 4 KiB from the third page of BAR 2 on: a ring of 16 entries uses one.
const LOCATION: u32 = 2 << 12 | 2;
const QUEUES: u32 = 1;
/// CAP.CMBS.
const HAS_CONTROL: u64 = 1 << 57;

fn pages(count: u32) -> u32 {
    count << 12
}

fn wanted(memory_buffer: CmbMode) -> ControllerOptions {
    ControllerOptions { memory_buffer, ..options() }
}

/// A started world, with a buffer of `count` pages and a BAR of the same size.
fn world(count: u32, use_of: CmbMode, change: impl FnOnce(&mut Script)) -> World {
    World::with(wanted(use_of), |script| {
        script.memory.set_bar((2 + count as usize) * 4096);
        script.cmb = [LOCATION, pages(count) | QUEUES];
        change(script);
    })
}

fn ready(count: u32, change: impl FnOnce(&mut Script)) -> World {
    let mut world = world(count, CmbMode::SubmissionQueues, change);
    world.run_until(|event| *event == Event::Ready);
    world
}

/// The two styles: before NVMe 1.4, and since.
const STYLES: [u64; 2] = [0, HAS_CONTROL];

/// Executes `count` commands on a queue pair, and checks that.
fn use_pair(world: &mut World, pair: usize, count: u64) {
    let before = world.pairs[pair].1.len();
    for token in 0..count {
        world.submit_io(pair, token);
        world.run(Span::from_ms(1));
    }
    let ended = world.pairs[pair].1[before..].iter().map(|it| (it.token, it.status));
    assert!(ended.eq((0..count).map(|token| (token, IoStatus::SUCCESS))));
    assert_eq!(world.device.script().faults, []);
}

fn kept_out(world: &World) -> Vec<(u16, CmbUnavailable)> {
    let found = world.told().into_iter().filter_map(|event| match event {
        Event::RingInHostMemory { id, why } => Some((id, why)),
        _ => None,
    });
    found.collect()
}

/// Final error of a controller that never becomes ready.
fn death(mut world: World) -> String {
    world.run_until(|event| matches!(event, Event::Dead(_) | Event::Ready));
    match world.told().pop() {
        Some(Event::Dead(error)) => {
            assert!(world.memory.is_cut_off());
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn rings_lie_in_the_buffer_of_either_style_and_commands_are_found_there() {
    for style in STYLES {
        let mut world = ready(4, |script| script.cap |= style);
        let allocations = world.memory.allocations();
        for id in [1, 2] {
            assert_eq!(world.create(None), id);
        }
        assert_eq!(world.memory.allocations(), allocations + 2, "completion rings only");
        // More than one wrap of 16 entries.
        for (pair, count) in [(0, 40), (1, 7)] {
            use_pair(&mut world, pair, count);
            assert_eq!(world.pairs[pair].0.stats().cmb_commands, count);
            assert!(world.pairs[pair].0.transport().memory().is_in_device);
        }
        assert_eq!(kept_out(&world), []);
        let part = tenmil_base::BarRange { bar: 2, offset: 2 * 4096, len_bytes: 4 * 4096 };
        assert_eq!(world.memory.bar_parts(), [part]);
        let script = world.device.script();
        assert_eq!(script.cmb_commands, 47);
        assert!(script.cmb_queues.iter().eq(&[1, 2]));
        let told = if style == 0 { 0 } else { (BAR + 2 * 4096) | 3 };
        assert_eq!(script.cmbmsc, told, "CRE, CMSE and the address of the BAR");
    }
}

#[test]
fn a_ring_is_zeroed_before_it_is_used() {
    let mut world = ready(1, |_| {});
    world.create(None);
    let mut ring = [1; 16 * 64];
    assert!(world.memory.bar_load(2 * 4096, &mut ring));
    assert_eq!(ring, [0; 16 * 64]);
}

#[test]
fn a_buffer_that_is_not_wanted_is_left_alone_or_only_shown() {
    // The setting of another driver is cleared, so that host memory may have that address.
    for (use_of, found) in [(CmbMode::Ignored, 0x5003), (CmbMode::Enabled, 1)] {
        let mut world = world(4, use_of, |script| {
            script.cap |= HAS_CONTROL;
            script.cmbmsc = 0x5003;
        });
        world.run_until(|event| *event == Event::Ready);
        world.create(None);
        use_pair(&mut world, 0, 3);
        assert_eq!(world.pairs[0].0.stats().cmb_commands, 0);
        assert_eq!((kept_out(&world), world.memory.bar_parts()), (vec![], vec![]));
        let script = world.device.script();
        assert_eq!((script.cmbmsc, script.cmb_reads, script.cmb_commands), (found, 0, 0));
    }
    let mut old = world(4, CmbMode::Enabled, |_| {});
    old.run_until(|event| *event == Event::Ready);
    assert_eq!(old.device.script().cmbmsc, 0, "before 1.4 there is nothing to write");
}

#[test]
fn without_a_buffer_of_use_rings_lie_in_host_memory_and_that_is_said() {
    type Change = fn(&mut Script);
    let cases: [(Change, CmbUnavailable, &str); 4] = [
        (|script| script.cmb = [0; 2], CmbUnavailable::Absent, "no controller memory buffer"),
        (|script| script.cmb[1] &= !QUEUES, CmbUnavailable::NoQueues, "CMBSZ.SQS is 0"),
        (
            |script| script.memory.set_bar_unusable("it belongs to another driver"),
            CmbUnavailable::Unusable { why: "it belongs to another driver" },
            "of no use: it belongs to another driver",
        ),
        (
            |script| script.refuses_address = true,
            CmbUnavailable::AddressRefused { address: BAR + 2 * 4096 },
            "does not take 0x8fe802000 for its memory buffer (CMBSTS.CBAI is 1)",
        ),
    ];
    for (change, why, text) in cases {
        let mut world = ready(4, |script| {
            script.cap |= HAS_CONTROL;
            change(script);
        });
        world.create(None);
        assert_eq!(kept_out(&world), [(1, why)]);
        assert!(why.to_string().contains(text), "{why}");
        use_pair(&mut world, 0, 20);
        assert_eq!(world.pairs[0].0.stats().cmb_commands, 0);
        assert_eq!(world.device.script().cmbmsc, 1, "no address is the buffer's");
        // A reset does not change it.
        world.controller.reset(world.now).unwrap();
        world.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
        use_pair(&mut world, 0, 20);
        assert_eq!(world.device.script().cmb_commands, 0);
    }
}

#[test]
fn what_does_not_fit_lies_in_host_memory_until_room_comes_back() {
    let mut world = ready(2, |script| script.cap |= HAS_CONTROL);
    let allocations = world.memory.allocations();
    for id in [1, 2, 3] {
        assert_eq!(world.create(None), id);
    }
    let no_room = |free_bytes, len_bytes| CmbUnavailable::Full { free_bytes, len_bytes };
    assert_eq!(kept_out(&world), [(3, no_room(0, 1024))]);
    (0..3).for_each(|pair| use_pair(&mut world, pair, 20));
    assert!(world.device.script().cmb_queues.iter().eq(&[1, 2]));

    world.controller.delete_queue_pair(world.now, 1).unwrap();
    world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    world.run(Span::from_ms(20));
    drop(world.pairs.remove(0));
    assert_eq!(world.create(None), 1);
    use_pair(&mut world, 2, 20);
    assert_eq!(world.pairs[2].0.stats().cmb_commands, 20, "the room of the one before");
    assert_eq!(kept_out(&world).len(), 1);

    // A ring of 256 entries uses four pages.
    let deep =
        QueuePairOptions { depth: 256, vector: None, techniques: FastPathOptions::default() };
    world.controller.create_queue_pair(world.now, deep).unwrap();
    world.run_until(|event| *event == Event::QueuePairCreated { id: 4 });
    assert_eq!(kept_out(&world)[1], (4, no_room(0, 16384)));

    world.controller.shut_down(world.now, crate::ShutdownNotification::Normal).unwrap();
    world.run_until(|event| matches!(event, Event::ShutDown { .. }));
    world.run(Span::from_ms(20));
    assert!(world.memory.allocations() <= allocations, "completion rings are given back, too");
}

#[test]
fn room_is_not_given_to_another_while_its_owner_may_write_there() {
    let mut world = ready(1, |_| {});
    world.create(None);
    world.polls_pairs = false;
    world.controller.delete_queue_pair(world.now, 1).unwrap();
    world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert_eq!(world.create(None), 1);
    assert_eq!(kept_out(&world).len(), 1);
    world.polls_pairs = true;
    world.run(Span::from_ms(20));
    world.create(None);
    assert_eq!(kept_out(&world).len(), 1, "by now it has let go");
}

#[test]
fn a_queue_that_is_refused_in_the_buffer_gives_its_room_back() {
    let mut world = ready(1, |_| {});
    for opcode in [0x05, 0x01] {
        let status = Status::INVALID_USE_OF_CMB;
        world.device.script().refuse = [(opcode, status)].into();
        let options =
            QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
        let id = world.controller.create_queue_pair(world.now, options).unwrap();
        world.run_until(|event| *event == Event::QueuePairRefused { id, status });
        world.device.script().refuse.clear();
    }
    world.create(None);
    use_pair(&mut world, 0, 5);
    assert_eq!((kept_out(&world), world.device.script().cmb_commands), (vec![], 5));
}

#[test]
fn without_memory_for_completions_the_room_for_commands_comes_back() {
    let mut world = ready(1, |_| {});
    let options =
        QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
    world.memory.set_limit(Some(0));
    let refused = world.controller.create_queue_pair(world.now, options);
    assert_eq!(refused, Err(RequestError::Memory { len_bytes: 16 * 80 }));
    world.memory.set_limit(None);
    world.create(None);
    assert_eq!(kept_out(&world), []);
}

/// Doorbells 2 KiB apart: those of the first queue pair do not fit into a page of shadow doorbells.
#[test]
fn a_queue_pair_without_doorbells_takes_neither_memory_nor_room() {
    let wanted = ControllerOptions { shadow_doorbells: true, ..wanted(CmbMode::SubmissionQueues) };
    let mut world = World::ready_with(wanted, |script| {
        script.memory.set_bar(3 * 4096);
        script.cmb = [LOCATION, pages(1) | QUEUES];
        script.cap |= 9 << 32;
        script.identity.push((256, vec![0, 1])); // OACS: doorbell buffer
        script.has_shadows = true;
    });
    let allocations = world.memory.allocations();
    let options =
        QueuePairOptions { depth: 16, vector: None, techniques: FastPathOptions::default() };
    for _ in 0..3 {
        let refused = world.controller.create_queue_pair(world.now, options);
        assert_eq!(refused, Err(RequestError::NoSuchQueue { id: 1 }));
        assert_eq!(world.memory.allocations(), allocations);
    }
}

#[test]
fn registers_that_lie_are_refused_by_name() {
    let of = |location: u32, size: u32| {
        STYLES.map(|style| {
            death(world(4, CmbMode::SubmissionQueues, |script| {
                script.cap |= style;
                script.cmb = [location, size | QUEUES];
            }))
        })
    };
    let both = |text: &str| [text.to_owned(), text.to_owned()];
    assert_eq!(of(6, pages(4)), both("CMBLOC.BIR is 0x6, expected 0 or 2 to 5"));
    let units = "CMBSZ.SZU is 0xf, expected at most 6: units of 64 GiB";
    assert_eq!(of(LOCATION, pages(1) | 0xf00), both(units));
    let outside = |end: u64, bar: u8, bytes: u32| {
        both(&format!(
            "CMBLOC and CMBSZ: the controller memory buffer ends at byte {end} of BAR {bar}, \
             expected at most {bytes}"
        ))
    };
    assert_eq!(of(LOCATION, pages(5)), outside(7 * 4096, 2, 6 * 4096));
    assert_eq!(of(LOCATION & !7 | 4, pages(1)), outside(3 * 4096, 4, 0));
    let far = (0xf_ffff << 36) + (0xf_ffff << 36);
    assert_eq!(of(0xffff_f002, 0xffff_f600), outside(far, 2, 6 * 4096));
}

#[test]
fn a_controller_that_vanishes_while_its_buffer_is_looked_at_is_removed() {
    let reads = ready(4, |script| script.cap |= HAS_CONTROL).device.script().reads;
    let mut removed = 0;
    for gone_at_read in reads - 4..=reads {
        let mut world = world(4, CmbMode::SubmissionQueues, |script| {
            script.cap |= HAS_CONTROL;
            script.gone_at_read = gone_at_read;
        });
        world.run_until(|event| matches!(event, Event::Removed | Event::Ready));
        removed += u32::from(world.told().last() == Some(&Event::Removed));
    }
    assert!(removed >= 3, "CMBSZ, CMBLOC, CMBSTS: {removed}");
}

#[test]
fn rings_come_back_where_they_were_after_a_reset_of_any_kind() {
    for style in STYLES {
        let mut world = ready(1, |script| script.cap |= style);
        world.create(None);
        use_pair(&mut world, 0, 5);
        // The second also clears CMBMSC.
        for round in [1, 2] {
            match round {
                1 => world.controller.reset(world.now).unwrap(),
                _ => world.controller.reset_subsystem(world.now).unwrap(),
            }
            world.events.clear();
            world.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
            use_pair(&mut world, 0, 20);
            assert_eq!(world.device.script().cmb_commands, 5 + round * 20);
        }
        assert_eq!(world.memory.bar_parts().len(), 1, "it is mapped once");
        assert_eq!(kept_out(&world), []);
    }
}

#[test]
fn commands_in_flight_over_a_reset_are_answered_and_never_done_again() {
    let mut world = ready(1, |script| script.cap |= HAS_CONTROL);
    world.create(None);
    world.device.script().answers_io = false;
    for token in 0..6 {
        world.submit_io(0, token);
    }
    world.run(Span::from_ms(1));
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| matches!(event, Event::QueuePairResumed { id: 1 }));
    world.device.script().answers_io = true;
    world.run(Span::from_ms(20));
    let ended = world.pairs[0].1.iter().map(|it| (it.token, it.status));
    assert!(ended.eq((0..6).map(|token| (token, IoStatus::ABORTED_BY_HOST))));
    assert_eq!(world.device.script().cmb_commands, 6);
}

#[test]
fn a_buffer_that_is_another_after_a_reset_is_the_end() {
    type Change = fn(&mut Script);
    let cases: [(Change, &str); 3] = [
        (|script| script.cmb[0] = 1 << 12 | 2, "CMBLOC and CMBSZ above it is"),
        (|script| script.cmb[1] = 0, "as queues lie there"),
        (|script| script.refuses_address = true, "CMBMSC.CBA is 0x8fe802000, expected to be taken"),
    ];
    for (change, text) in cases {
        let mut world = ready(2, |script| script.cap |= HAS_CONTROL);
        world.create(None);
        use_pair(&mut world, 0, 3);
        change(&mut world.device.script());
        world.controller.reset(world.now).unwrap();
        world.run_until(|event| matches!(event, Event::Dead(_)));
        let Some(Event::Dead(error)) = world.told().pop() else { panic!("{:?}", world.told()) };
        assert!(error.to_string().contains(text), "{error}");
        world.assert_state(State::Dead);
        assert_eq!(world.device.script().cmb_commands, 3);
    }
}
