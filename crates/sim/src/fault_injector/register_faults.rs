//! Register faults.

use tenmil_base::Instant;

use super::{Fault, FaultInjector, InjectionPoint, QueueKind};

/// Injection point of register reads.
const REGISTERS: InjectionPoint = InjectionPoint { queue: QueueKind::Any, opcode: None };

/// CC.EN and CC.SHN (Base 2.1 §3.1.4.5).
const CC_EN: u32 = 1;
const CC_SHN: u32 = 0b11 << 14;

impl FaultInjector {
    /// Value that the host reads from a register with the real `value`.
    pub fn on_register_read(&mut self, now: Instant, offset: u32, value: u64) -> u64 {
        self.counters.reads += 1;
        if !self.is_removed {
            let vanishes = |fault: &Fault| *fault == Fault::Gone;
            self.is_removed = self.take_due_fault(now, REGISTERS, vanishes).is_some();
        }
        if self.is_removed
            || self.take_due_fault(now, REGISTERS, |fault| *fault == Fault::Masked).is_some()
        {
            return u64::MAX;
        }
        let mut seen = value;
        // Several faults of one register apply at the same time, each with its own count.
        for index in 0..self.plan.len() {
            if let Fault::Register { offset: of, mask, bits } = self.plan[index].mischief.fault
                && of == offset
                && self.take_fault_if_due(index, now)
            {
                seen = seen & !mask | bits & mask;
            }
        }
        seen
    }

    /// Whether a register write reaches the device.
    pub fn passes_register_write(&mut self, now: Instant) -> bool {
        !self.is_removed
            && self.take_due_fault(now, REGISTERS, |fault| *fault == Fault::Masked).is_none()
    }

    /// Counts the transitions of CC.
    pub fn count_cc_transitions(&mut self, before: u32, after: u32) {
        match (before & CC_EN, after & CC_EN) {
            (0, CC_EN) => self.counters.enables += 1,
            (CC_EN, 0) => self.counters.disables += 1,
            _ => {}
        }
        if before & CC_SHN == 0 && after & CC_SHN != 0 {
            self.counters.shutdowns += 1;
        }
    }

    fn take_fault_if_due(&mut self, index: usize, now: Instant) -> bool {
        let counters = self.counters;
        let armed = &mut self.plan[index];
        let mischief = armed.mischief;
        if !mischief.gate.is_triggered(now, &counters) {
            return false;
        }
        armed.seen += 1;
        let strikes = armed.seen > mischief.skip && armed.done < mischief.times;
        armed.done += u32::from(strikes);
        self.faults += u64::from(strikes);
        strikes
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random};

    use super::super::{Fault, FaultInjector, FaultTrigger, PlannedFault, lies};

    const NOW: Instant = Instant { ns: 1 };
    const CSTS: u32 = 0x1c;

    #[test]
    fn register_fields_are_replaced_separately() {
        let plan = [lies::NEVER_READY, lies::FATAL].map(PlannedFault::for_all_commands);
        let mut evil = FaultInjector::new(&plan, Random::new(1));
        assert_eq!(evil.on_register_read(NOW, CSTS, 0b1001), 0b1010);
        assert_eq!(evil.on_register_read(NOW, 0x14, 0b1001), 0b1001);
    }

    #[test]
    fn removed_device_stays_removed_and_a_masked_one_returns() {
        let gone = PlannedFault::for_all_commands(Fault::Gone).with_skip(1).with_count(1);
        let mut evil = FaultInjector::new(&[gone], Random::new(1));
        assert_eq!(evil.on_register_read(NOW, CSTS, 1), 1);
        assert_eq!(evil.on_register_read(NOW, CSTS, 1), u64::MAX);
        assert_eq!(evil.on_register_read(NOW, CSTS, 1), u64::MAX);
        assert!(evil.is_removed() && !evil.passes_register_write(NOW));

        let masked = PlannedFault::for_all_commands(Fault::Masked).with_skip(1).with_count(1);
        let mut evil = FaultInjector::new(&[masked], Random::new(1));
        let seen = [0; 3].map(|value| evil.on_register_read(NOW, CSTS, value));
        assert_eq!(seen, [0, u64::MAX, 0]);
        assert!(!evil.is_removed() && evil.passes_register_write(NOW));
    }

    #[test]
    fn enables_disables_and_shutdowns_are_counted() {
        let mut evil = FaultInjector::new(&[], Random::new(1));
        for (before, after) in [(0, 1), (1, 1), (1, 0x4001), (0x4001, 0), (0, 1), (1, 0)] {
            evil.count_cc_transitions(before, after);
        }
        let counters = evil.trigger_counters();
        assert_eq!((counters.enables, counters.disables, counters.shutdowns), (2, 2, 1));
        assert!(FaultTrigger::Disables(2).is_triggered(NOW, &counters));
        assert!(!FaultTrigger::Disables(3).is_triggered(NOW, &counters));
    }
}
