//! Registers that lie.

use base::Instant;

use super::{Evil, Fault, QueueKind, Site};

/// Where a register value comes from.
const REGISTERS: Site = Site { queue: QueueKind::Any, opcode: None };

/// CC.EN and CC.SHN (Base 2.1 §3.1.4.5).
const CC_EN: u32 = 1;
const CC_SHN: u32 = 0b11 << 14;

impl Evil {
    /// What the host sees of a register that holds `value`.
    pub fn on_read(&mut self, now: Instant, offset: u32, value: u64) -> u64 {
        self.counters.reads += 1;
        if !self.is_gone {
            let vanishes = |fault: &Fault| *fault == Fault::Gone;
            self.is_gone = self.strike(now, REGISTERS, vanishes).is_some();
        }
        if self.is_gone || self.strike(now, REGISTERS, |fault| *fault == Fault::Masked).is_some() {
            return u64::MAX;
        }
        let mut seen = value;
        // Several fields of one register may lie at once, each counted for itself.
        for index in 0..self.plan.len() {
            if let Fault::Register { offset: of, mask, bits } = self.plan[index].mischief.fault
                && of == offset
                && self.strike_at(index, now)
            {
                seen = seen & !mask | bits & mask;
            }
        }
        seen
    }

    /// Whether a write reaches the device.
    pub fn on_write(&mut self, now: Instant) -> bool {
        !self.is_gone && self.strike(now, REGISTERS, |fault| *fault == Fault::Masked).is_none()
    }

    /// Takes note of what CC becomes.
    pub fn on_configuration(&mut self, before: u32, after: u32) {
        match (before & CC_EN, after & CC_EN) {
            (0, CC_EN) => self.counters.enables += 1,
            (CC_EN, 0) => self.counters.disables += 1,
            _ => {}
        }
        if before & CC_SHN == 0 && after & CC_SHN != 0 {
            self.counters.shutdowns += 1;
        }
    }

    fn strike_at(&mut self, index: usize, now: Instant) -> bool {
        let counters = self.counters;
        let armed = &mut self.plan[index];
        let mischief = armed.mischief;
        if !mischief.gate.is_open(now, &counters) {
            return false;
        }
        armed.seen += 1;
        let strikes = armed.seen > mischief.skip && armed.done < mischief.times;
        armed.done += u32::from(strikes);
        self.deeds += u64::from(strikes);
        strikes
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Random};

    use super::super::{Evil, Fault, Gate, Mischief, lies};

    const NOW: Instant = Instant { ns: 1 };
    const CSTS: u32 = 0x1c;

    #[test]
    fn fields_lie_each_by_itself_and_other_registers_do_not() {
        let plan = [lies::NEVER_READY, lies::FATAL].map(Mischief::always);
        let mut evil = Evil::new(&plan, Random::new(1));
        assert_eq!(evil.on_read(NOW, CSTS, 0b1001), 0b1010);
        assert_eq!(evil.on_read(NOW, 0x14, 0b1001), 0b1001);
    }

    #[test]
    fn a_device_that_is_gone_stays_gone_and_one_that_is_masked_comes_back() {
        let gone = Mischief::always(Fault::Gone).skip(1).times(1);
        let mut evil = Evil::new(&[gone], Random::new(1));
        assert_eq!(evil.on_read(NOW, CSTS, 1), 1);
        assert_eq!(evil.on_read(NOW, CSTS, 1), u64::MAX);
        assert_eq!(evil.on_read(NOW, CSTS, 1), u64::MAX);
        assert!(evil.is_gone() && !evil.on_write(NOW));

        let masked = Mischief::always(Fault::Masked).skip(1).times(1);
        let mut evil = Evil::new(&[masked], Random::new(1));
        let seen = [0; 3].map(|value| evil.on_read(NOW, CSTS, value));
        assert_eq!(seen, [0, u64::MAX, 0]);
        assert!(!evil.is_gone() && evil.on_write(NOW));
    }

    #[test]
    fn enabling_disabling_and_shutting_down_are_counted() {
        let mut evil = Evil::new(&[], Random::new(1));
        for (before, after) in [(0, 1), (1, 1), (1, 0x4001), (0x4001, 0), (0, 1), (1, 0)] {
            evil.on_configuration(before, after);
        }
        let counters = evil.counters();
        assert_eq!((counters.enables, counters.disables, counters.shutdowns), (2, 2, 1));
        assert!(Gate::Disables(2).is_open(NOW, &counters));
        assert!(!Gate::Disables(3).is_open(NOW, &counters));
    }
}
