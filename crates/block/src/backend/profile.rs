//! The devices that can be modelled: a few numbers each, from public specification sheets.

use base::{Random, Span};

/// What a model knows about a device. The typical latencies and the rates are those of the public
/// specification sheet, rounded. The shape of the tail and the number of units are chosen so that
/// depth 1 shows the typical latency and great depth the rate; they are nobody's measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The name in `model:NAME`.
    pub name: &'static str,
    /// What is modelled.
    pub device: &'static str,
    /// Bytes on the device.
    pub capacity_bytes: u64,
    /// Dies that work side by side; requests to one queue up.
    pub units: u32,
    /// Bytes after which the next unit is used.
    pub stripe_bytes: u32,
    /// Time that a request spends outside of the units: command, controller and bus.
    pub overhead: Span,
    /// Time that a unit needs to read.
    pub read: Latency,
    /// Time that a unit needs to take a write, into whatever stands in front of it.
    pub write: Latency,
    /// Time for everything that moves no data.
    pub other: Span,
    /// How much the whole device reads at most.
    pub read_rates: Rates,
    /// How much the whole device writes at most.
    pub write_rates: Rates,
}

/// A distribution of latencies: points of its cumulative curve, straight lines between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latency {
    /// Per thousand million of all, and the nanoseconds that these do not exceed. The first is for
    /// none, the last for all.
    pub curve: &'static [(u64, u64)],
}

/// What a device can do at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Requests of up to 4 KiB in a second.
    pub requests: u64,
    /// Bytes in a second.
    pub bytes: u64,
}

/// The devices of the two experiments that this project starts from.
pub const PROFILES: &[Profile] = &[
    Profile {
        name: "p4600",
        device: "Intel SSD DC P4600 1.6 TB",
        capacity_bytes: 1_600_321_314_816,
        units: 64,
        stripe_bytes: 16 << 10,
        overhead: Span::from_us(13),
        read: Latency {
            curve: &[
                (0, 64_000),
                (500_000_000, 72_000),
                (990_000_000, 88_000),
                (999_000_000, 160_000),
                (999_990_000, 900_000),
                (1_000_000_000, 2_500_000),
            ],
        },
        // Power-loss protected memory takes a write; the flash behind it is in the rates.
        write: Latency {
            curve: &[
                (0, 1_000),
                (500_000_000, 2_000),
                (990_000_000, 6_000),
                (999_000_000, 60_000),
                (999_990_000, 900_000),
                (1_000_000_000, 4_000_000),
            ],
        },
        other: Span::from_us(20),
        read_rates: Rates { requests: 559_000, bytes: 3_200_000_000 },
        write_rates: Rates { requests: 176_000, bytes: 1_325_000_000 },
    },
    Profile {
        name: "p4800x",
        device: "Intel Optane SSD DC P4800X 375 GB",
        capacity_bytes: 375_083_606_016,
        units: 28,
        stripe_bytes: 4 << 10,
        overhead: Span::from_us(5),
        read: Latency {
            curve: &[
                (0, 3_400),
                (500_000_000, 4_000),
                (990_000_000, 5_200),
                (999_990_000, 32_000),
                (1_000_000_000, 60_000),
            ],
        },
        write: Latency {
            curve: &[
                (0, 3_600),
                (500_000_000, 4_600),
                (990_000_000, 7_000),
                (999_990_000, 70_000),
                (1_000_000_000, 120_000),
            ],
        },
        other: Span::from_us(10),
        read_rates: Rates { requests: 550_000, bytes: 2_400_000_000 },
        write_rates: Rates { requests: 500_000, bytes: 2_000_000_000 },
    },
];

impl Profile {
    /// The profile of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PROFILES.iter().find(|profile| profile.name == name)
    }

    /// One line for whoever reads a number that a model has made.
    pub fn describe(&self) -> String {
        let Self { device, units, read_rates, write_rates, .. } = self;
        format!(
            "a model of an {device} and not one: typical read {} us and write {} us, {units} units, \
             at most {} k reads/s and {} k writes/s",
            self.typical_ns(&self.read) / 1_000,
            self.typical_ns(&self.write) / 1_000,
            read_rates.requests / 1_000,
            write_rates.requests / 1_000,
        )
    }

    fn typical_ns(&self, latency: &Latency) -> u64 {
        self.overhead.ns + latency.at(PARTS / 2).ns
    }
}

/// The unit of a curve's first numbers: a thousand million is all.
const PARTS: u64 = 1_000_000_000;

impl Latency {
    /// Draws one.
    pub fn draw(&self, random: &mut Random) -> Span {
        self.at(random.below(PARTS))
    }

    /// What `part` of all do not exceed.
    fn at(&self, part: u64) -> Span {
        let above = self.curve.iter().position(|(share, _)| *share > part);
        let above = above.unwrap_or(self.curve.len() - 1);
        let ((from, low), (to, high)) = (self.curve[above - 1], self.curve[above]);
        Span { ns: low + (high - low) * (part - from) / (to - from) }
    }
}

impl Rates {
    /// How long one request keeps all others back.
    pub fn spacing(self, len_bytes: u64) -> Span {
        let by_count = 1_000_000_000 / self.requests;
        // A request of more than 16 GiB does not exist, so the product fits.
        Span { ns: by_count.max(len_bytes * 1_000_000_000 / self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use base::{Random, Span};

    use super::{PARTS, PROFILES, Profile};

    #[test]
    fn every_curve_rises_from_none_to_all() {
        for profile in PROFILES {
            for latency in [&profile.read, &profile.write] {
                let (first, last) = (latency.curve[0], latency.curve[latency.curve.len() - 1]);
                assert_eq!((first.0, last.0), (0, PARTS));
                for pair in latency.curve.windows(2) {
                    assert!(pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1, "{pair:?}");
                }
                assert_eq!(latency.at(0), Span { ns: first.1 });
                assert_eq!(latency.at(PARTS), Span { ns: last.1 });
            }
        }
    }

    #[test]
    fn what_is_drawn_follows_the_curve() {
        const COUNT: u64 = 1_000_000;
        for profile in PROFILES {
            for latency in [&profile.read, &profile.write] {
                let mut random = Random::new(11);
                let drawn: Vec<u64> = (0..COUNT).map(|_| latency.draw(&mut random).ns).collect();
                for (share, ns) in latency.curve {
                    let below = drawn.iter().filter(|value| *value <= ns).count() as u64;
                    let shown = below * (PARTS / COUNT);
                    // Five standard deviations at the median, and more further out.
                    assert!(shown.abs_diff(*share) < PARTS / 400, "{ns} ns: {shown}");
                    let tail = (PARTS - share).max(1_000);
                    assert!(PARTS - shown < 2 * tail, "{ns} ns: {shown}");
                }
            }
        }
    }

    #[test]
    fn a_description_says_that_it_is_a_model() {
        assert_eq!(
            Profile::named("p4600").unwrap().describe(),
            "a model of an Intel SSD DC P4600 1.6 TB and not one: typical read 85 us and write \
             15 us, 64 units, at most 559 k reads/s and 176 k writes/s"
        );
        assert!(Profile::named("p4800x").unwrap().describe().contains("read 9 us and write 9 us"));
        assert_eq!(Profile::named("P4600"), None);
    }

    #[test]
    fn capacities_are_whole_blocks() {
        assert!(PROFILES.iter().all(|profile| profile.capacity_bytes.is_multiple_of(4096)));
    }
}
