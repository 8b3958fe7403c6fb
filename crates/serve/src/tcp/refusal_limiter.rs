//! Rate limit for events of refused connections: a peer cannot fill the log, and its further refusals are
//! counted.

use std::collections::BTreeMap;

use tenmil_base::{Instant, Span};

/// Refusals by address.
#[derive(Debug, Default)]
pub(super) struct RefusalLimiter {
    addresses: BTreeMap<String, AddressRefusals>,
}

/// Refusals of one address in an interval.
#[derive(Debug)]
struct AddressRefusals {
    since: Instant,
    reported: u32,
    unreported: u64,
}

/// Length of an interval.
const INTERVAL: Span = Span::from_secs(10);
/// Refusals of an address that are reported in an interval.
const REPORTED_MAX: u32 = 16;
/// Largest number of addresses that are remembered.
const ADDRESSES_MAX: usize = 1024;

impl RefusalLimiter {
    /// Counts a refusal. Returns the number of refusals of the address that were not reported before, if
    /// this one is to be reported.
    pub(super) fn count(&mut self, now: Instant, address: &str) -> Option<u64> {
        if self.addresses.len() >= ADDRESSES_MAX && !self.addresses.contains_key(address) {
            self.forget_an_address(now);
        }
        let refusals = self.addresses.entry(address.to_owned()).or_insert(AddressRefusals {
            since: now,
            reported: 0,
            unreported: 0,
        });
        if now >= refusals.since.after(INTERVAL) {
            (refusals.since, refusals.reported) = (now, 0);
        }
        if refusals.reported >= REPORTED_MAX {
            refusals.unreported += 1;
            return None;
        }
        refusals.reported += 1;
        Some(std::mem::take(&mut refusals.unreported))
    }

    /// Forgets the addresses whose interval has passed, or else the one that was refused first.
    fn forget_an_address(&mut self, now: Instant) {
        self.addresses.retain(|_, refusals| now < refusals.since.after(INTERVAL));
        if self.addresses.len() >= ADDRESSES_MAX {
            let oldest = self.addresses.iter().min_by_key(|(_, refusals)| refusals.since);
            let oldest = oldest.map(|(address, _)| address.clone());
            oldest.map(|address| self.addresses.remove(&address));
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{ADDRESSES_MAX, INTERVAL, REPORTED_MAX, RefusalLimiter};

    #[test]
    fn refusals_of_one_address_are_reported_up_to_a_rate() {
        let mut limiter = RefusalLimiter::default();
        let start = Instant { ns: 1_000 };
        for count in 0..100 {
            let is_reported = limiter.count(start, "192.0.2.1").is_some();
            assert_eq!(is_reported, count < REPORTED_MAX);
        }
        assert_eq!(limiter.count(start, "192.0.2.2"), Some(0), "another address");
        let later = start.after(INTERVAL);
        let unreported = u64::from(100 - REPORTED_MAX);
        assert_eq!(limiter.count(later, "192.0.2.1"), Some(unreported));
        assert_eq!(limiter.count(later, "192.0.2.1"), Some(0));
    }

    #[test]
    fn number_of_addresses_is_bounded() {
        let mut limiter = RefusalLimiter::default();
        let mut now = Instant { ns: 1_000 };
        for address in 0..3 * ADDRESSES_MAX {
            now = now.after(Span::from_us(1));
            limiter.count(now, &address.to_string());
            assert!(limiter.addresses.len() <= ADDRESSES_MAX);
        }
        assert!(limiter.addresses.contains_key(&(3 * ADDRESSES_MAX - 1).to_string()));
        limiter.count(now.after(INTERVAL), "new");
        assert_eq!(limiter.addresses.len(), 1, "the others have been silent");
    }
}
