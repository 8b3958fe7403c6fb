//! Wall-clock time in UTC and its text (RFC 3339).

use core::fmt;

/// Time of the wall clock, for display. It jumps when the clock of a machine is set; distances and order
/// in time are those of an [`Instant`](crate::Instant).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UtcTime {
    /// Microseconds since 1970-01-01T00:00:00Z, without leap seconds (POSIX time).
    pub unix_us: u64,
}

/// Date of the Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    year: u64,
    /// 1 to 12.
    month: u64,
    /// 1 to 31.
    day: u64,
}

const DAY_S: u64 = 86_400;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: u64 = 719_468;
/// Days in 400 years, after which the calendar repeats.
const ERA_DAYS: u64 = 146_097;

impl UtcTime {
    /// Time in whole seconds since 1970.
    #[must_use]
    pub const fn from_unix_secs(seconds: u64) -> Self {
        Self { unix_us: seconds.saturating_mul(1_000_000) }
    }
}

impl Date {
    /// Date of a day, counted from 1970-01-01.
    ///
    /// A year begins in March here, so that the leap day is its last and the lengths of the months
    /// before a month are a linear function of its number, rounded down.
    const fn from_days_since_1970(days: u64) -> Self {
        let days = days + EPOCH_DAYS;
        let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
        // Whole leap days are subtracted: one in 4 years, none in 100, one in 400.
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let (year, month) = match month {
            0..10 => (year, month + 3),
            _ => (year + 1, month - 9),
        };
        Self { year: era * 400 + year, month, day }
    }
}

/// `2026-11-26T22:47:49.123456Z`, and with `{:.0}` whole seconds: `2026-11-26T22:47:49Z`.
impl fmt::Display for UtcTime {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, us) = (self.unix_us / 1_000_000, self.unix_us % 1_000_000);
        let Date { year, month, day } = Date::from_days_since_1970(seconds / DAY_S);
        let second = seconds % DAY_S;
        let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
        write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")?;
        if out.precision() != Some(0) {
            write!(out, ".{us:06}")?;
        }
        out.write_str("Z")
    }
}

#[cfg(test)]
mod tests {
    use super::{Date, UtcTime};

    #[test]
    fn known_times_are_printed_correctly() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00"),
            (68_169_599, "1972-02-28T23:59:59"),
            (68_169_600, "1972-02-29T00:00:00"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_000_000_000, "2001-09-09T01:46:40"),
            (1_709_210_096, "2024-02-29T12:34:56"),
            (2_147_483_647, "2038-01-19T03:14:07"),
            (4_107_542_400, "2100-03-01T00:00:00"),
            (253_402_300_799, "9999-12-31T23:59:59"),
        ] {
            let time = UtcTime { unix_us: seconds * 1_000_000 + 42 };
            assert_eq!(time.to_string(), format!("{text}.000042Z"));
            assert_eq!(format!("{:.0}", UtcTime::from_unix_secs(seconds)), format!("{text}Z"));
        }
    }

    /// A day after the other through 400 years and more, by the rule of the calendar.
    #[test]
    fn days_of_five_centuries_are_consecutive() {
        let mut date = Date { year: 1970, month: 1, day: 1 };
        for day in 0..(500 * 366) {
            assert_eq!(Date::from_days_since_1970(day), date, "day {day}");
            let leap = date.year.is_multiple_of(4)
                && (!date.year.is_multiple_of(100) || date.year.is_multiple_of(400));
            let length = match date.month {
                2 => 28 + u64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            date.day += 1;
            if date.day > length {
                (date.day, date.month) = (1, date.month + 1);
            }
            if date.month > 12 {
                (date.month, date.year) = (1, date.year + 1);
            }
        }
    }

    #[test]
    fn any_timestamp_can_be_printed() {
        assert!(UtcTime::from_unix_secs(u64::MAX).to_string().starts_with("586524-"));
    }
}
