//! Rate limits of the log: a token bucket per cause, and one for the total.

use std::collections::BTreeMap;

use tenmil_base::{Instant, Span};

use super::LogRecord;

/// Rate limiter of log lines.
#[derive(Debug)]
pub(super) struct LogLimiter {
    causes: BTreeMap<String, CauseState>,
    /// Shared entry for causes that do not fit into the table.
    rest: CauseState,
    total: TokenBucket,
}

/// Suppressed lines of one cause.
#[derive(Debug, PartialEq)]
pub(super) struct SuppressedSummary {
    pub(super) lines: u64,
    pub(super) last: LogRecord,
}

#[derive(Debug)]
struct CauseState {
    bucket: TokenBucket,
    suppressed: u64,
    /// Last suppressed record; `Some` if there is any.
    last: Option<LogRecord>,
    /// Time of the first suppressed line.
    since: Instant,
}

/// Token bucket.
#[derive(Debug)]
struct TokenBucket {
    tokens: u64,
    tokens_max: u64,
    interval: Span,
    refilled_at: Instant,
}

/// Burst per cause, and the interval of one further line.
const CAUSE_LINES: u64 = 20;
const CAUSE_INTERVAL: Span = Span::from_secs(1);
/// Burst of all causes, and the interval of one further line.
const TOTAL_LINES: u64 = 200;
const TOTAL_INTERVAL: Span = Span::from_ms(50);
/// Maximum number of separate causes.
const CAUSES_MAX: usize = 256;
/// Suppressed lines are summarized after this time.
const SUMMARY_AFTER: Span = Span::from_secs(5);

impl Default for LogLimiter {
    fn default() -> Self {
        let start = Instant::default();
        Self {
            causes: BTreeMap::new(),
            rest: CauseState::new(start),
            total: TokenBucket::new(TOTAL_LINES, TOTAL_INTERVAL, start),
        }
    }
}

impl LogLimiter {
    /// Returns the record if it is to be written.
    pub(super) fn admit(&mut self, record: LogRecord, now: Instant) -> Option<LogRecord> {
        let total = &mut self.total;
        let is_known = self.causes.contains_key(&record.cause);
        let has_place =
            is_known || self.causes.len() < CAUSES_MAX || forget_idle(&mut self.causes, now);
        let cause = if has_place {
            self.causes.entry(record.cause.clone()).or_insert_with(|| CauseState::new(now))
        } else {
            &mut self.rest
        };
        // The total is charged second, so that a flood of one cause uses little of it.
        if cause.bucket.take_token(now) && total.take_token(now) {
            return Some(record);
        }
        if cause.suppressed == 0 {
            cause.since = now;
        }
        cause.suppressed += 1;
        cause.last = Some(record);
        None
    }

    /// Whether suppressed lines have not been summarized yet.
    pub(super) fn has_suppressed(&self) -> bool {
        self.all_causes().any(|cause| cause.suppressed > 0)
    }

    /// Next due summary: of lines suppressed for [`SUMMARY_AFTER`].
    pub(super) fn take_due_summary(&mut self, now: Instant) -> Option<SuppressedSummary> {
        self.take_summary_if(|cause| now.since(cause.since) >= SUMMARY_AFTER)
    }

    /// Next summary, due or not.
    pub(super) fn take_any_summary(&mut self) -> Option<SuppressedSummary> {
        self.take_summary_if(|_| true)
    }

    fn take_summary_if(
        &mut self,
        is_due: impl Fn(&CauseState) -> bool,
    ) -> Option<SuppressedSummary> {
        let causes = self.causes.values_mut().chain([&mut self.rest]);
        let cause = causes.into_iter().find(|cause| cause.suppressed > 0 && is_due(cause))?;
        let lines = std::mem::take(&mut cause.suppressed);
        Some(SuppressedSummary { lines, last: cause.last.take()? })
    }

    fn all_causes(&self) -> impl Iterator<Item = &CauseState> {
        self.causes.values().chain([&self.rest])
    }
}

/// Removes causes whose buckets are full again, which is the initial state. Returns whether any was
/// removed.
fn forget_idle(causes: &mut BTreeMap<String, CauseState>, now: Instant) -> bool {
    let before = causes.len();
    causes.retain(|_, cause| cause.suppressed > 0 || !cause.bucket.is_full(now));
    causes.len() < before
}

impl CauseState {
    fn new(now: Instant) -> Self {
        let bucket = TokenBucket::new(CAUSE_LINES, CAUSE_INTERVAL, now);
        Self { bucket, suppressed: 0, last: None, since: now }
    }
}

impl TokenBucket {
    fn new(tokens_max: u64, interval: Span, now: Instant) -> Self {
        Self { tokens: tokens_max, tokens_max, interval, refilled_at: now }
    }

    fn refill(&mut self, now: Instant) {
        let count = now.since(self.refilled_at).ns / self.interval.ns;
        self.tokens = self.tokens.saturating_add(count).min(self.tokens_max);
        self.refilled_at = if self.tokens == self.tokens_max {
            now
        } else {
            self.refilled_at.after(Span { ns: count * self.interval.ns })
        };
    }

    fn take_token(&mut self, now: Instant) -> bool {
        self.refill(now);
        let has_one = self.tokens > 0;
        self.tokens -= u64::from(has_one);
        has_one
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.tokens == self.tokens_max
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span, UtcTime};

    use super::{CAUSE_LINES, CAUSES_MAX, LogLimiter, SuppressedSummary, TOTAL_LINES};
    use crate::process_log::{LogLevel, LogRecord};

    fn instant_at_ms(ms: u64) -> Instant {
        Instant::default().after(Span::from_ms(ms))
    }

    fn test_record(cause: &str) -> LogRecord {
        LogRecord {
            cause: cause.into(),
            at: UtcTime::from_unix_secs(0),
            level: LogLevel::Info,
            module: "test",
            message: format!("about {cause}"),
            fields: Vec::new(),
        }
    }

    fn count_admitted(limiter: &mut LogLimiter, cause: &str, count: u64, now: Instant) -> u64 {
        (0..count).map(|_| u64::from(limiter.admit(test_record(cause), now).is_some())).sum()
    }

    #[test]
    fn cause_has_a_burst_and_then_one_line_per_second() {
        let mut limiter = LogLimiter::default();
        assert_eq!(count_admitted(&mut limiter, "a", 100, instant_at_ms(0)), CAUSE_LINES);
        assert_eq!(count_admitted(&mut limiter, "a", 100, instant_at_ms(999)), 0);
        assert_eq!(count_admitted(&mut limiter, "a", 100, instant_at_ms(3_000)), 3);
        assert_eq!(
            count_admitted(&mut limiter, "b", 100, instant_at_ms(3_000)),
            CAUSE_LINES,
            "others are not limited"
        );
    }

    #[test]
    fn suppressed_lines_are_summarized_once_after_five_seconds() {
        let mut limiter = LogLimiter::default();
        count_admitted(&mut limiter, "a", CAUSE_LINES + 7, instant_at_ms(10));
        assert!(limiter.has_suppressed());
        assert_eq!(limiter.take_due_summary(instant_at_ms(5_009)), None);
        let summary = SuppressedSummary { lines: 7, last: test_record("a") };
        assert_eq!(limiter.take_due_summary(instant_at_ms(5_010)), Some(summary));
        assert_eq!(limiter.take_due_summary(instant_at_ms(60_000)), None);
        assert!(!limiter.has_suppressed());
    }

    #[test]
    fn causes_share_a_total_limit_and_a_bounded_table() {
        let mut limiter = LogLimiter::default();
        let mut count = 0;
        for index in 0..10_000 {
            count += count_admitted(&mut limiter, &index.to_string(), 1, instant_at_ms(0));
        }
        assert!(count <= TOTAL_LINES, "{count}");
        assert!(limiter.causes.len() <= CAUSES_MAX);
        let mut suppressed = 0;
        while let Some(summary) = limiter.take_any_summary() {
            suppressed += summary.lines;
        }
        assert_eq!(count + suppressed, 10_000, "each line is written or counted");
    }

    #[test]
    fn idle_cause_frees_its_entry() {
        let mut limiter = LogLimiter::default();
        for index in 0..CAUSES_MAX {
            count_admitted(&mut limiter, &index.to_string(), 1, instant_at_ms(index as u64 * 100));
        }
        assert_eq!(count_admitted(&mut limiter, "new", 1, instant_at_ms(60_000)), 1);
        assert!(limiter.causes.contains_key("new"));
    }
}
