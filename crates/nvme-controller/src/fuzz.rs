//! Fuzz target for a whole controller: registers, rings and memory of a hostile host.
//!
//! The bytes are a script. Some steps act as a driver would, so that the others find queues to corrupt.
//! The other steps are arbitrary: stores to any register, any doorbell values, commands and lists with
//! any content. No step may cause a panic, and after the script, a controller reset has to complete with
//! every bounce buffer free and no access to host memory in flight.

use std::sync::Arc;

use tenmil_base::{Instant, Segment, Span};
use tenmil_wire::admin::{CreateIoCompletionQueue, CreateIoSubmissionQueue};
use tenmil_wire::{Command, TypedCommand};

use crate::BouncePool;
use crate::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use crate::transport::{MemoryTransport, MemoryTransportConfig};
use block_device::FakeDevice;
use fake_host::{BOUNCE, FakeHost, FakeRam, HostBehavior, RecordedInterrupts};

pub(crate) mod block_device;
pub(crate) mod fake_host;

/// Runs a script against a controller.
///
/// # Panics
///
/// The controller panics, or a reset does not complete: a finding.
pub fn fuzz_memory_transport(script: &[u8]) {
    let Some((&mode, script)) = script.split_first() else { return };
    let Some(mut run) = MemoryTransportFuzz::new(mode) else { return };
    let mut script = FuzzScript(script);
    for _ in 0..STEPS_MAX {
        if script.0.is_empty() {
            break;
        }
        run.run_script_step(&mut script);
    }
    run.reset_and_check_no_new_access();
}

/// Maximum steps of one script; each performs bounded work.
const STEPS_MAX: usize = 256;
/// Bytes of host memory: rings in the first half, data in the second.
const HOST_BYTES: u32 = 0x2_0000;
/// Entries of the rings that a regular step creates.
const ENTRIES: u16 = 8;
const BUFFERS: usize = 2;

struct MemoryTransportFuzz {
    ram: Arc<FakeRam>,
    transport: MemoryTransport<FakeHost, RecordedInterrupts>,
    buffers: BouncePool,
    now: Instant,
    /// Tail of each submission queue, as the driver keeps it.
    tails: [u16; 4],
}

struct FuzzScript<'a>(&'a [u8]);

impl FuzzScript<'_> {
    /// Next `N` bytes, padded with zeroes.
    fn next_bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (taken, rest) = self.0.split_at(N.min(self.0.len()));
        bytes[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        bytes
    }

    fn next_byte(&mut self) -> u8 {
        let [byte] = self.next_bytes();
        byte
    }

    fn next_u32(&mut self) -> u32 {
        u32::from_le_bytes(self.next_bytes())
    }
}

impl MemoryTransportFuzz {
    fn new(mode: u8) -> Option<Self> {
        let behavior = HostBehavior {
            shares_rings: mode & 1 == 0,
            shares_data: mode & 2 == 0,
            completes_later: mode & 4 != 0,
        };
        let ram = FakeRam::new(HOST_BYTES as usize, BUFFERS * 0x1000);
        let device = FakeDevice::new(&ram, 64);
        let device = if mode & 8 == 0 { device } else { device.with_random_delays(mode.into()) };
        let mut namespace = NamespaceConfig::new(Arc::new(device));
        namespace.nsid = Some(1);
        let subsystem = Subsystem::new(SubsystemConfig::new("FUZZ", vec![namespace])).ok()?;
        let now = Instant { ns: 1 };
        let config = ControllerConfig {
            io_queues_max: 3,
            vectors: 3,
            transfer_bytes_max: 1 << 15,
            queue_entries_max: 16,
            ..ControllerConfig::default()
        };
        let controller = subsystem.open_controller(now, config).ok()?;
        let buffer = |index: usize| Segment {
            region: BOUNCE,
            offset: index as u64 * 0x1000,
            len_bytes: 0x1000,
        };
        let buffers = BouncePool::new(ram.clone(), (0..BUFFERS).map(buffer).collect());
        let transport = MemoryTransport::new(
            controller,
            FakeHost::new(&ram, behavior, mode.into()),
            RecordedInterrupts::default(),
            buffers.clone(),
            MemoryTransportConfig {
                in_flight_max: 8,
                contexts_max: 3,
                ..MemoryTransportConfig::default()
            },
        );
        Some(Self { ram, transport, buffers, now, tails: [0; 4] })
    }

    fn run_script_step(&mut self, script: &mut FuzzScript<'_>) {
        match script.next_byte() % 10 {
            0 => self.enable_controller(),
            1 => self.create_queue(u16::from(script.next_byte() % 3) + 1),
            // A command with a chosen opcode and namespace, the rest arbitrary.
            2 => {
                let [queue, opcode, flags, place] = script.next_bytes();
                let command =
                    Command(core::array::from_fn(|_| u64::from_le_bytes(script.next_bytes())));
                let data = 0x1_0000 + u64::from(place) * 0x40;
                let command = command.with_opcode(opcode % 0x20).with_nsid(u32::from(flags & 3));
                let command = if flags & 4 != 0 { command.with_prp(data, data) } else { command };
                self.submit_command(usize::from(queue % 4), command);
            }
            3 => {
                let queue = usize::from(script.next_byte() % 4);
                let command =
                    Command(core::array::from_fn(|_| u64::from_le_bytes(script.next_bytes())));
                self.submit_command(queue, command);
            }
            4 => {
                let (at, value) = (script.next_u32() & 0x3fff, script.next_u32());
                let size = [1, 2, 4, 8][usize::from(script.next_byte() % 4)];
                self.transport.write_register(self.now, at, size, u64::from(value) << (value & 31));
                let _ = self.transport.read_register(at, size);
            }
            5 => {
                let (index, value) = (u32::from(script.next_byte() % 12), script.next_u32());
                let value = if value & 1 == 0 { value % 20 } else { value };
                self.transport.write_doorbell(self.now, index, value);
            }
            6 => {
                let (at, bytes) = (script.next_u32() % HOST_BYTES, script.next_bytes::<16>());
                self.write_host_memory(u64::from(at), &bytes);
            }
            // Frees completion entries.
            7 => {
                let (index, head) =
                    (u32::from(script.next_byte() % 4), u32::from(script.next_byte() % 8));
                self.transport.write_doorbell(self.now, index * 2 + 1, head);
            }
            8 => self.poll(usize::from(script.next_byte() % 64)),
            _ => {
                self.transport.write_register(
                    self.now,
                    0x14,
                    4,
                    u64::from(script.next_u32() & 0xc001),
                );
                self.poll(4);
            }
        }
        self.poll(1);
    }

    fn enable_controller(&mut self) {
        self.tails = [0; 4];
        self.write_host_memory(0x1000, &[0; 0x1000]);
        let depth = u64::from(ENTRIES - 1);
        for (at, size, value) in [
            (0x24, 4, depth << 16 | depth),
            (0x28, 8, 0x1000),
            (0x30, 8, 0x2000),
            (0x14, 4, 4 << 20 | 6 << 16 | 1),
        ] {
            self.transport.write_register(self.now, at, size, value);
        }
        self.poll(3);
    }

    fn create_queue(&mut self, qid: u16) {
        let (qsize, ring) = (ENTRIES - 1, u64::from(qid) * 0x2000 + 0x2000);
        let completion =
            CreateIoCompletionQueue { qid, qsize, pc: true, ien: qid != 2, iv: qid % 3 };
        let submission =
            CreateIoSubmissionQueue { qid, qsize, pc: true, cqid: qid, ..Default::default() };
        self.tails[usize::from(qid)] = 0;
        self.submit_command(0, completion.to_command().with_prp(ring, 0));
        self.poll(30);
        self.submit_command(0, submission.to_command().with_prp(ring + 0x1000, 0));
        self.poll(30);
    }

    fn submit_command(&mut self, queue: usize, command: Command) {
        let ring = if queue == 0 { 0x1000 } else { queue as u64 * 0x2000 + 0x3000 };
        let tail = self.tails[queue];
        self.write_host_memory(ring + u64::from(tail) * 64, &command.to_bytes());
        self.tails[queue] = (tail + 1) % ENTRIES;
        let index = u32::try_from(queue * 2).unwrap_or(u32::MAX);
        self.transport.write_doorbell(self.now, index, self.tails[queue].into());
    }

    fn write_host_memory(&mut self, at: u64, bytes: &[u8]) {
        let mut memory = self.ram.host_bytes();
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        if let Some(place) = memory.get_mut(start..start.saturating_add(bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    fn poll(&mut self, count: usize) {
        for _ in 0..count {
            self.now = self.now.after(Span::from_us(7));
            let _ = self.transport.poll(self.now);
        }
    }

    fn reset_and_check_no_new_access(&mut self) {
        self.transport.write_register(self.now, 0x14, 4, 0);
        self.poll(1);
        self.ram.forbid_new_access(true);
        for _ in 0..10_000 {
            if self.transport.read_register(0x1c, 4) & 1 == 0 {
                break;
            }
            self.poll(1);
        }
        assert_eq!(self.transport.read_register(0x1c, 4) & 3, 0, "it comes to rest");
        self.ram.forbid_all_access(true);
        self.poll(20);
        assert_eq!(self.ram.violation_count(), 0, "nothing touches the host after that");
        assert_eq!(self.buffers.free_count(), BUFFERS, "every buffer is back");
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::fuzz_memory_transport;

    #[test]
    fn random_scripts_violate_no_transport_invariant() {
        let mut random = Random::new(0x5eed);
        for seed in 0..1_500 {
            let len = random.below(700);
            let script: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[0]).collect();
            // Half of the scripts begin as a driver does.
            let mode = random.next_u64().to_le_bytes()[0];
            let opening: &[u8] = if seed % 2 == 0 { &[0, 1, 0, 1, 1] } else { &[] };
            fuzz_memory_transport(&[&[mode], opening, &script].concat());
        }
    }

    #[test]
    fn empty_fuzz_script_runs_without_panic() {
        fuzz_memory_transport(&[]);
        fuzz_memory_transport(&[0]);
    }
}
