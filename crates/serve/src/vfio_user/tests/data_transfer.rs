//! Functions of the device for a well-behaved client.

use tenmil_base::Span;
use tenmil_linux::EventFdVectors;
use tenmil_reactor::PollMode;
use tenmil_vfio_user::{ClientEvent, IrqAction, IrqSelection, IrqSet, irq_index, region_index};

use super::test_client::{DATA, TestServer};

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn data_is_transferred_by_shared_memory_and_messages_in_every_poll_mode() {
    for (poll, is_shared) in [
        (PollMode::Always, true),
        (PollMode::Adaptive, true),
        (PollMode::Always, false),
        (PollMode::Adaptive, false),
    ] {
        let mut rig = TestServer::new(poll);
        let mut machine = rig.connect_client();
        machine.map_own_memory(is_shared);
        machine.enable_controller();
        machine.create_io_queue();
        let data = pattern(16 * 512);
        machine.store_memory(DATA, &data);
        assert_eq!(machine.execute_read_or_write(1, 8, 16), 0);
        machine.store_memory(DATA, &vec![0; data.len()]);
        assert_eq!(machine.execute_read_or_write(2, 8, 16), 0);
        assert!(machine.load_memory(DATA, 16 * 512) == data, "{poll:?} {is_shared}");
        assert_eq!(machine.asked == 0, is_shared, "what is shared is not asked for");
        // More commands than queue entries, so that the rings wrap around.
        for poll in 0..40 {
            assert_eq!(machine.execute_read_or_write(2, poll, 1), 0, "{poll:?} {is_shared} {poll}");
        }
        drop(machine);
        rig.stop();
    }
}

#[test]
fn interrupt_vector_signals_the_eventfd_of_its_client() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    let vectors = EventFdVectors::new(2).unwrap();
    let id = machine.set_vector_eventfds(&vectors);
    assert_eq!(machine.await_errno(id), 0);
    machine.enable_controller();
    machine.create_io_queue();
    let time_limit = Span::from_secs(20);
    assert!(vectors.wait_for_signal(0, time_limit).unwrap(), "of the admin queue");
    assert!(!vectors.clear_signals(1));
    machine.execute_read_or_write(2, 0, 1);
    assert!(vectors.wait_for_signal(1, time_limit).unwrap());
    let mut set = |action, data| {
        let (index, start, count) = (irq_index::MSIX, 1, 1);
        let id = machine.client.request_set_irqs(IrqSet { index, start, count, action, data });
        assert_eq!(machine.await_errno(id), 0);
    };
    set(IrqAction::Trigger, IrqSelection::All);
    assert!(vectors.wait_for_signal(1, time_limit).unwrap(), "by hand");
    set(IrqAction::Mask, IrqSelection::Some(vec![true]));
    set(IrqAction::Trigger, IrqSelection::All);
    assert!(!vectors.clear_signals(1), "masked");
    set(IrqAction::Unmask, IrqSelection::All);
    assert!(vectors.wait_for_signal(1, time_limit).unwrap(), "and remembered");
    set(IrqAction::Trigger, IrqSelection::Files(Vec::new()));
    machine.execute_read_or_write(2, 0, 1);
    // The reply follows the completion, so all signals have been sent.
    machine.read_region(0, 4);
    assert!(!vectors.clear_signals(1), "the line was taken away");
}

#[test]
fn msix_table_masks_a_vector_and_keeps_its_content() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    let vectors = EventFdVectors::new(2).unwrap();
    let id = machine.set_vector_eventfds(&vectors);
    assert_eq!(machine.await_errno(id), 0);
    machine.enable_controller();
    machine.create_io_queue();
    let id = machine.client.request_region_read(region_index::CONFIGURATION, 0x94, 4);
    let ClientEvent::Data { data, .. } = machine.await_reply_to(id) else { panic!() };
    let table = u64::from(u32::from_le_bytes(data.try_into().unwrap()));
    machine.write_region(table + 16 + 12, &1_u32.to_le_bytes());
    machine.execute_read_or_write(2, 0, 1);
    machine.read_region(0, 4);
    assert!(!vectors.clear_signals(1), "masked");
    machine.write_region(table + 16 + 12, &0_u32.to_le_bytes());
    assert!(vectors.wait_for_signal(1, Span::from_secs(20)).unwrap());
}

#[test]
fn device_info_offers_mapped_doorbells_only_if_the_reactor_always_polls() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = TestServer::new(poll);
        let mut machine = rig.connect_client();
        machine.client.request_device_info();
        let device = machine.await_reply(|reply| matches!(reply, ClientEvent::Device { .. }));
        assert!(matches!(device, ClientEvent::Device { regions: 9, irqs: 5, can_reset: true }));
        machine.client.request_region_info(region_index::BAR0);
        let region = machine.await_reply(|reply| matches!(reply, ClientEvent::Region { .. }));
        let ClientEvent::Region { shape, file, .. } = region else { panic!() };
        assert_eq!(shape.size, 0x4000);
        assert_eq!(
            (shape.areas.len() == 1, file.is_some()),
            (poll == PollMode::Always, poll == PollMode::Always)
        );
        machine.client.request_irq_info(irq_index::MSIX);
        let irqs = machine.await_reply(|reply| matches!(reply, ClientEvent::Irqs { .. }));
        let ClientEvent::Irqs { shape, .. } = irqs else { panic!() };
        assert_eq!(shape.count, 5);
        assert_eq!(machine.read_region(8, 4), 0x0002_0100, "version 2.1");
    }
}

/// Reset by DEVICE_RESET, by the bit in configuration space, and by CC.EN.
#[test]
fn reset_restores_the_initial_state() {
    let rig = TestServer::new(PollMode::Always);
    for how in 0..3 {
        let mut machine = rig.connect_client();
        machine.map_own_memory(true);
        for _ in 0..3 {
            machine.enable_controller();
            machine.create_io_queue();
            assert_eq!(machine.execute_read_or_write(2, 0, 1), 0);
            match how {
                0 => {
                    let id = machine.client.request_reset();
                    assert_eq!(machine.await_errno(id), 0);
                    assert_eq!(machine.read_region(0x1c, 4) & 1, 0);
                }
                1 => {
                    let id = machine.client.request_region_write(
                        region_index::CONFIGURATION,
                        0x58,
                        &[0, 0x80],
                    );
                    assert_eq!(machine.await_errno(id), 0);
                    assert_eq!(machine.read_region(0x1c, 4) & 1, 0);
                }
                _ => {
                    machine.write_region(0x14, &0_u32.to_le_bytes());
                    machine.await_csts_ready(0);
                }
            }
            machine.clear_queues();
        }
    }
}
