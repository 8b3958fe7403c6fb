//! Commands that wait for a rate limit.
//!
//! ```text
//!   Command ─┬─ data in the capsule ─ received ─┐
//!            └─ others: no memory, no R2T ──────┴─ RateGate ─┬─ admitted ──────────────────▶ as without limits
//!                                                            └─ held, oldest first ─ later ─┘
//! ```
//!
//! A held command has no memory, except one with its data in the capsule. When those hold
//! [`HELD_BYTES_MAX`], the stream is not read until some are released, so the host's own socket holds the
//! rest.

use std::collections::VecDeque;

use tenmil_base::{Instant, Memory, Span};
use tenmil_block::{IoDirection, QosLimiter, RateGate};
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_wire::{Command, IoOpcode};

use super::{AdmitResult, CommandSlot, CommandState, CommandTable};
use crate::tcp::rate_limits::ConnectionLimiters;

/// Rate limits of a connection, and the commands that wait for them.
#[derive(Debug, Default)]
pub(super) struct HeldCommands {
    generation: u64,
    /// The first one is for namespaces without limits of their own.
    gates: Vec<NamespaceGate>,
    /// Tags, oldest first.
    held: VecDeque<u16>,
    /// When to try again.
    retry_at: Instant,
    /// Data of held commands.
    held_bytes: u32,
    /// In-capsule data were not received, because held commands have the most that they may have.
    is_stream_blocked: bool,
    /// Commands were held since the last call of [`CommandTable::take_limit_report`].
    has_new: bool,
    waits: Vec<LimitWait>,
    copied: Vec<CopiedBlocks>,
}

/// Gate of one namespace.
#[derive(Debug)]
struct NamespaceGate {
    /// Namespace identifier; 0 for all without a gate of their own.
    nsid: u32,
    gate: RateGate,
    /// By direction: commands held, and when to try the oldest one again.
    held: [u32; 2],
    retry_at: [Instant; 2],
}

/// Commands for a namespace that have waited for a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tcp) struct LimitWait {
    pub(in crate::tcp) nsid: u32,
    pub(in crate::tcp) count: u64,
    /// Sum of the times that they waited.
    pub(in crate::tcp) time: Span,
}

/// Blocks that a Copy command for a namespace copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tcp) struct CopiedBlocks {
    pub(in crate::tcp) nsid: u32,
    pub(in crate::tcp) blocks: u64,
}

/// What has happened since the last report.
#[derive(Debug, Default)]
pub(in crate::tcp) struct LimitReport {
    /// Whether commands were held.
    pub(in crate::tcp) has_new: bool,
    /// Commands that were released.
    pub(in crate::tcp) waits: Vec<LimitWait>,
    /// Copy commands that start; [`CommandTable::charge_copied`] charges their bytes.
    pub(in crate::tcp) copied: Vec<CopiedBlocks>,
}

/// Most in-capsule data of held commands of a connection.
const HELD_BYTES_MAX: u32 = 64 << 10;

/// Direction of a command that limits apply to. They do not apply to flushes, nor to commands that do not
/// access blocks.
fn limited_direction(command: &Command) -> Option<IoDirection> {
    match IoOpcode::from_u8(command.opcode())? {
        IoOpcode::Read | IoOpcode::Compare | IoOpcode::Verify => Some(IoDirection::Read),
        IoOpcode::Write
        | IoOpcode::WriteZeroes
        | IoOpcode::WriteUncorrectable
        | IoOpcode::DatasetManagement
        | IoOpcode::Copy => Some(IoDirection::Write),
        _ => None,
    }
}

/// The bytes that a command is charged for when it is admitted: those of blocks that it transfers. Of Copy these
/// are in its data, which have not been received then: it waits for bytes that were charged before it, and is
/// charged for its own when it starts.
fn transferred_bytes(command: &Command, len_bytes: u32) -> u64 {
    match IoOpcode::from_u8(command.opcode()) {
        Some(IoOpcode::Read | IoOpcode::Write | IoOpcode::Compare | IoOpcode::Copy) => {
            len_bytes.into()
        }
        _ => 0,
    }
}

/// Offset of NLB, 0's based, in a Source Range Entry (NVM 1.1 §3.3.2, Figures 39 and 40).
const NLB_OFFSET: usize = 16;
/// Length of a Source Range Entry by its format.
const RANGE_BYTES: [usize; 2] = [32, 40];

/// The blocks of all source ranges of a Copy command whose data are `bytes`. What is wrong with them is found when
/// the command is executed.
fn copied_blocks(command: &Command, bytes: &[u8]) -> u64 {
    let (count, format) = ((command.cdw12() & 0xff) + 1, command.cdw12() >> 8 & 0xf);
    let Some(range_bytes) = RANGE_BYTES.get(format as usize) else { return 0 };
    let blocks = |range: &[u8]| {
        let nlb = range.get(NLB_OFFSET..NLB_OFFSET + 2);
        nlb.map_or(0, |nlb| u64::from(u16::from_le_bytes([nlb[0], nlb[1]])) + 1)
    };
    bytes.chunks_exact(*range_bytes).take(count as usize).map(blocks).sum()
}

impl CommandTable {
    /// Sets the rate limits. Held commands stay held, now by the new limits.
    pub(in crate::tcp) fn set_limiters(&mut self, limiters: &ConnectionLimiters) {
        if self.held.is_none() && limiters.is_unlimited() {
            return;
        }
        let held = self.held.get_or_insert_default();
        held.set_limiters(limiters);
        for tag in &held.held {
            let slot = &self.slots[usize::from(*tag)];
            if let Some(direction) = limited_direction(&slot.command) {
                let gate = gate_of(&mut held.gates, slot.command.nsid());
                gate.held[direction as usize] += 1;
            }
        }
        self.drop_unused_limits();
    }

    /// Generation of the limiters; 0 if there are none.
    pub(in crate::tcp) fn limiter_generation(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.generation)
    }

    /// Applies the limits to a received command. Returns `None` if it continues as without limits.
    #[cold]
    pub(super) fn hold_received(
        &mut self,
        now: Instant,
        tag: u16,
        is_in_capsule: bool,
    ) -> Option<AdmitResult> {
        let (held, slot) = (self.held.as_mut()?, &mut self.slots[usize::from(tag)]);
        slot.has_passed_limits = !is_in_capsule;
        if is_in_capsule {
            // The command itself is held when its data have been received.
            held.is_stream_blocked = held.held_bytes >= HELD_BYTES_MAX;
            if held.is_stream_blocked {
                slot.state = CommandState::Free;
                return Some(AdmitResult::NoBuffer);
            }
            return None;
        }
        held.hold_unless_admitted(now, tag, slot).then_some(AdmitResult::Deferred)
    }

    /// Applies the limits to a command whose data were in its capsule. Returns whether it is held.
    #[cold]
    pub(super) fn hold_complete(&mut self, now: Instant, tag: u16) -> bool {
        let Some(held) = &mut self.held else { return false };
        let slot = &mut self.slots[usize::from(tag)];
        if slot.has_passed_limits {
            self.report_copy(tag);
            return false;
        }
        slot.has_passed_limits = true;
        let is_held = held.hold_unless_admitted(now, tag, slot);
        if !is_held {
            self.report_copy(tag);
        }
        is_held
    }

    /// Reports the blocks of a Copy command that starts, with its data.
    fn report_copy(&mut self, tag: u16) {
        let (Some(held), slot) = (&mut self.held, &self.slots[usize::from(tag)]) else { return };
        if IoOpcode::from_u8(slot.command.opcode()) != Some(IoOpcode::Copy) {
            return;
        }
        let mut bytes = vec![0; slot.data.len_bytes as usize];
        // The buffer lies in a region that lives as long as its pool.
        if self.cache.pool().regions().load(slot.data, &mut bytes).is_ok() {
            let blocks = copied_blocks(&slot.command, &bytes);
            held.copied.push(CopiedBlocks { nsid: slot.command.nsid(), blocks });
        }
    }

    /// Charges the bytes of a Copy command that has started: those after it wait longer.
    #[cold]
    pub(in crate::tcp) fn charge_copied(&mut self, now: Instant, nsid: u32, bytes: u64) {
        let Some(held) = &mut self.held else { return };
        gate_of(&mut held.gates, nsid).gate.charge(now, IoDirection::Write, 0, bytes);
    }

    /// Charges a half of a fused pair. It is not held: the commands after it wait for it instead.
    #[cold]
    pub(super) fn charge_fused(&mut self, now: Instant, command: &Command, len_bytes: u32) {
        let Some(held) = &mut self.held else { return };
        if let Some(direction) = limited_direction(command) {
            let gate = gate_of(&mut held.gates, command.nsid());
            gate.gate.charge(now, direction, 1, transferred_bytes(command, len_bytes));
        }
    }

    /// Next held command that is released and can start. Others continue with their buffer or their data.
    #[cold]
    pub(super) fn next_released(
        &mut self,
        end: &mut ControllerConnection,
        now: Instant,
    ) -> Option<u16> {
        while let Some(tag) =
            self.held.as_mut().and_then(|held| held.release_next(now, &self.slots))
        {
            let slot = &mut self.slots[usize::from(tag)];
            if slot.len_bytes == 0 || slot.buffer.is_some() {
                slot.state = CommandState::Ready;
                self.report_copy(tag);
                return Some(tag);
            }
            let len_bytes = slot.len_bytes;
            let buffer =
                if self.waiting.is_empty() { self.allocate_buffer(len_bytes) } else { None };
            let Some(buffer) = buffer else {
                self.slots[usize::from(tag)].state = CommandState::AwaitingBuffer;
                self.waiting.push_back(tag);
                continue;
            };
            self.leave_wait_queue();
            self.slots[usize::from(tag)].set_buffer(buffer, self.cache.pool());
            if self.start_transfer(end, (tag, now), false) == AdmitResult::Ready {
                return Some(tag);
            }
        }
        None
    }

    /// Removes a held command that ends otherwise.
    #[cold]
    pub(super) fn remove_held(&mut self, tag: u16) {
        if let Some(held) = &mut self.held {
            let at = held.held.iter().position(|other| *other == tag);
            if let Some(at) = at {
                held.remove(at, &self.slots[usize::from(tag)]);
            }
        }
    }

    /// Drops all held commands: nothing new starts.
    pub(in crate::tcp) fn cancel_held(&mut self) {
        let Some(held) = &mut self.held else { return };
        held.is_stream_blocked = false;
        while let Some(&tag) = self.held.as_ref().and_then(|held| held.held.front()) {
            self.remove_held(tag);
            self.release_command(tag);
        }
    }

    /// When held commands must be tried again.
    pub(in crate::tcp) fn limit_retry_at(&self) -> Instant {
        match &self.held {
            Some(held) if !held.held.is_empty() => held.retry_at,
            _ => Instant::NEVER,
        }
    }

    /// Whether the stream is not read because of commands that are held.
    pub(in crate::tcp) fn is_stream_blocked_by_limits(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_stream_blocked)
    }

    /// What has happened since the last call, if there are limits.
    #[inline]
    pub(in crate::tcp) fn take_limit_report(&mut self) -> Option<LimitReport> {
        let held = self.held.as_mut()?;
        let report = LimitReport {
            has_new: std::mem::take(&mut held.has_new),
            waits: std::mem::take(&mut held.waits),
            copied: std::mem::take(&mut held.copied),
        };
        self.drop_unused_limits();
        Some(report)
    }

    /// Returns to the path without limits, once there are none and no command is held.
    fn drop_unused_limits(&mut self) {
        if self.held.as_ref().is_some_and(|held| held.is_unused()) {
            self.held = None;
        }
    }
}

impl HeldCommands {
    /// Whether there are neither limits nor commands that have waited for one.
    fn is_unused(&self) -> bool {
        !self.has_held() && self.gates.iter().all(|gate| gate.gate.has_limiters(&[]))
    }

    /// Whether commands are held, or are to be reported.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty() || self.has_new || !self.waits.is_empty() || !self.copied.is_empty()
    }

    /// Replaces the gates, except those whose limiters are the same: they keep their reservations.
    fn set_limiters(&mut self, limiters: &ConnectionLimiters) {
        self.generation = limiters.generation;
        let mut old = std::mem::take(&mut self.gates);
        let mut add = |nsid: u32, limiters: &[QosLimiter]| {
            let is_same =
                |gate: &NamespaceGate| gate.nsid == nsid && gate.gate.has_limiters(limiters);
            let gate = match old.iter().position(is_same) {
                Some(at) => old.swap_remove(at).gate,
                None => RateGate::new(limiters),
            };
            let retry_at = [Instant::default(); 2];
            self.gates.push(NamespaceGate { nsid, gate, held: [0; 2], retry_at });
        };
        add(0, &limiters.all);
        for (nsid, limiter) in &limiters.namespaces {
            add(*nsid, &[&limiters.all[..], std::slice::from_ref(limiter)].concat());
        }
        self.retry_at = Instant::default();
    }

    /// Holds a command unless it is admitted now. Returns whether it is held.
    fn hold_unless_admitted(&mut self, now: Instant, tag: u16, slot: &mut CommandSlot) -> bool {
        let Some(direction) = limited_direction(&slot.command) else { return false };
        let gate = gate_of(&mut self.gates, slot.command.nsid());
        let bytes = transferred_bytes(&slot.command, slot.len_bytes);
        // Those before it are first.
        if gate.held[direction as usize] == 0 {
            match gate.gate.admit(now, direction, bytes) {
                Ok(()) => return false,
                Err(at) => gate.retry_at[direction as usize] = at,
            }
            let at = gate.retry_at[direction as usize];
            self.retry_at = if self.held.is_empty() { at } else { self.retry_at.min(at) };
        }
        gate.held[direction as usize] += 1;
        (slot.state, slot.requested_at) = (CommandState::AwaitingLimit, now);
        self.held.push_back(tag);
        self.held_bytes += held_bytes(slot);
        self.has_new = true;
        true
    }

    /// Next command that is admitted now.
    fn release_next(&mut self, now: Instant, slots: &[CommandSlot]) -> Option<u16> {
        if now < self.retry_at {
            return None;
        }
        for at in 0..self.held.len() {
            let tag = self.held[at];
            let slot = &slots[usize::from(tag)];
            let command = &slot.command;
            let gate = gate_of(&mut self.gates, command.nsid());
            let is_admitted = limited_direction(command).is_none_or(|direction| {
                let retry_at = &mut gate.retry_at[direction as usize];
                if now < *retry_at {
                    return false;
                }
                let bytes = transferred_bytes(command, slot.len_bytes);
                match gate.gate.admit(now, direction, bytes) {
                    Ok(()) => true,
                    Err(later) => {
                        *retry_at = later;
                        false
                    }
                }
            });
            if is_admitted {
                self.remove(at, slot);
                self.count_wait(command.nsid(), now.since(slot.requested_at));
                return Some(tag);
            }
        }
        let waiting = self.gates.iter().flat_map(|gate| gate.retry_at.iter().zip(gate.held));
        let retries = waiting.filter(|(_, held)| *held > 0).map(|(retry_at, _)| *retry_at);
        self.retry_at = retries.min().unwrap_or(Instant::NEVER);
        None
    }

    fn remove(&mut self, at: usize, slot: &CommandSlot) {
        self.held.remove(at);
        self.held_bytes -= held_bytes(slot);
        if let Some(direction) = limited_direction(&slot.command) {
            gate_of(&mut self.gates, slot.command.nsid()).held[direction as usize] -= 1;
        }
    }

    fn count_wait(&mut self, nsid: u32, time: Span) {
        match self.waits.iter_mut().find(|wait| wait.nsid == nsid) {
            Some(wait) => {
                wait.count += 1;
                wait.time.ns += time.ns;
            }
            None => self.waits.push(LimitWait { nsid, count: 1, time }),
        }
    }
}

/// The gate of a namespace.
fn gate_of(gates: &mut [NamespaceGate], nsid: u32) -> &mut NamespaceGate {
    let own = gates.iter().skip(1).position(|gate| gate.nsid == nsid);
    &mut gates[own.map_or(0, |at| at + 1)]
}

/// The memory that a held command has.
fn held_bytes(slot: &CommandSlot) -> u32 {
    if slot.buffer.is_some() { slot.len_bytes } else { 0 }
}
