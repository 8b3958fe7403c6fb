//! Profiles of modeled SSDs: a few numbers each, from public specification sheets.

use tenmil_base::{Random, Span};

/// Parameters of a modeled SSD. Typical latencies and rates are those of the public specification sheet,
/// rounded. The tail of the distribution and the number of units are chosen, not measured: with them,
/// queue depth 1 shows the typical latency and a high queue depth the rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelProfile {
    /// The name in `model:NAME`.
    pub name: &'static str,
    /// The modeled device.
    pub device: &'static str,
    /// Capacity in bytes.
    pub capacity_bytes: u64,
    /// Number of parallel dies; requests to the same one queue.
    pub units: u32,
    /// Bytes after which the next unit is used.
    pub stripe_bytes: u32,
    /// Time of a request outside the units: command, controller and bus.
    pub overhead: Span,
    /// Time of a unit for a read.
    pub read: LatencyDistribution,
    /// Time of a unit to accept a write into its write buffer.
    pub write: LatencyDistribution,
    /// Time of requests that transfer no data.
    pub other: Span,
    /// Maximum read rates of the whole device.
    pub read_rates: MaximumRates,
    /// Maximum write rates of the whole device.
    pub write_rates: MaximumRates,
}

/// A latency distribution: points of its cumulative curve with linear interpolation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyDistribution {
    /// Pairs of a quantile in parts per billion and its latency in nanoseconds. The first quantile is 0,
    /// the last 1.
    pub curve: &'static [(u64, u64)],
}

/// Maximum rates of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaximumRates {
    /// Requests of up to 4 KiB per second.
    pub requests: u64,
    /// Bytes per second.
    pub bytes: u64,
}

/// The modeled devices: the two SSDs of the experiments that this project started from.
pub const PROFILES: &[ModelProfile] = &[
    ModelProfile {
        name: "p4600",
        device: "Intel SSD DC P4600 1.6 TB",
        capacity_bytes: 1_600_321_314_816,
        units: 64,
        stripe_bytes: 16 << 10,
        overhead: Span::from_us(13),
        read: LatencyDistribution {
            curve: &[
                (0, 64_000),
                (500_000_000, 72_000),
                (990_000_000, 88_000),
                (999_000_000, 160_000),
                (999_990_000, 900_000),
                (1_000_000_000, 2_500_000),
            ],
        },
        // Power-loss protected memory accepts a write; the flash behind it is covered by the rates.
        write: LatencyDistribution {
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
        read_rates: MaximumRates { requests: 559_000, bytes: 3_200_000_000 },
        write_rates: MaximumRates { requests: 176_000, bytes: 1_325_000_000 },
    },
    ModelProfile {
        name: "p4800x",
        device: "Intel Optane SSD DC P4800X 375 GB",
        capacity_bytes: 375_083_606_016,
        units: 28,
        stripe_bytes: 4 << 10,
        overhead: Span::from_us(5),
        read: LatencyDistribution {
            curve: &[
                (0, 3_400),
                (500_000_000, 4_000),
                (990_000_000, 5_200),
                (999_990_000, 32_000),
                (1_000_000_000, 60_000),
            ],
        },
        write: LatencyDistribution {
            curve: &[
                (0, 3_600),
                (500_000_000, 4_600),
                (990_000_000, 7_000),
                (999_990_000, 70_000),
                (1_000_000_000, 120_000),
            ],
        },
        other: Span::from_us(10),
        read_rates: MaximumRates { requests: 550_000, bytes: 2_400_000_000 },
        write_rates: MaximumRates { requests: 500_000, bytes: 2_000_000_000 },
    },
];

impl ModelProfile {
    /// The profile with this name.
    pub fn find_by_name(name: &str) -> Option<&'static Self> {
        PROFILES.iter().find(|profile| profile.name == name)
    }

    /// One line that marks numbers of a model as such.
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

    fn typical_ns(&self, latency: &LatencyDistribution) -> u64 {
        self.overhead.ns + latency.at_quantile(PARTS / 2).ns
    }
}

/// The unit of quantiles: one billion is 1.
const PARTS: u64 = 1_000_000_000;

impl LatencyDistribution {
    /// Draws a latency.
    pub fn random_latency(&self, random: &mut Random) -> Span {
        self.at_quantile(random.below(PARTS))
    }

    /// The latency at quantile `part`.
    fn at_quantile(&self, part: u64) -> Span {
        let above = self.curve.iter().position(|(share, _)| *share > part);
        let above = above.unwrap_or(self.curve.len() - 1);
        let ((from, low), (to, high)) = (self.curve[above - 1], self.curve[above]);
        Span { ns: low + (high - low) * (part - from) / (to - from) }
    }
}

impl MaximumRates {
    /// Time between this request and the next one at the maximum rate.
    pub fn request_spacing(self, len_bytes: u64) -> Span {
        let by_count = 1_000_000_000 / self.requests;
        // A request is at most 16 GiB, so the product fits.
        Span { ns: by_count.max(len_bytes * 1_000_000_000 / self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Random, Span};

    use super::{ModelProfile, PARTS, PROFILES};

    #[test]
    fn latency_curves_are_monotonic() {
        for profile in PROFILES {
            for latency in [&profile.read, &profile.write] {
                let (first, last) = (latency.curve[0], latency.curve[latency.curve.len() - 1]);
                assert_eq!((first.0, last.0), (0, PARTS));
                for pair in latency.curve.windows(2) {
                    assert!(pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1, "{pair:?}");
                }
                assert_eq!(latency.at_quantile(0), Span { ns: first.1 });
                assert_eq!(latency.at_quantile(PARTS), Span { ns: last.1 });
            }
        }
    }

    #[test]
    fn random_latencies_follow_the_curve() {
        const COUNT: u64 = 1_000_000;
        for profile in PROFILES {
            for latency in [&profile.read, &profile.write] {
                let mut random = Random::new(11);
                let drawn: Vec<u64> =
                    (0..COUNT).map(|_| latency.random_latency(&mut random).ns).collect();
                for (share, ns) in latency.curve {
                    let below = drawn.iter().filter(|value| *value <= ns).count() as u64;
                    let shown = below * (PARTS / COUNT);
                    // Five standard deviations at the median, and more in the tail.
                    assert!(shown.abs_diff(*share) < PARTS / 400, "{ns} ns: {shown}");
                    let tail = (PARTS - share).max(1_000);
                    assert!(PARTS - shown < 2 * tail, "{ns} ns: {shown}");
                }
            }
        }
    }

    #[test]
    fn profile_description_marks_it_as_a_model() {
        assert_eq!(
            ModelProfile::find_by_name("p4600").unwrap().describe(),
            "a model of an Intel SSD DC P4600 1.6 TB and not one: typical read 85 us and write \
             15 us, 64 units, at most 559 k reads/s and 176 k writes/s"
        );
        assert!(
            ModelProfile::find_by_name("p4800x")
                .unwrap()
                .describe()
                .contains("read 9 us and write 9 us")
        );
        assert_eq!(ModelProfile::find_by_name("P4600"), None);
    }

    #[test]
    fn model_capacities_are_whole_blocks() {
        assert!(PROFILES.iter().all(|profile| profile.capacity_bytes.is_multiple_of(4096)));
    }
}
