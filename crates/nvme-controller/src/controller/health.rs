//! Controller health: data of the SMART / Health log page, and its warnings (Base 2.1 §5.1.12.1.3).

use tenmil_base::{Instant, Span};

use super::transport_interface::IoTotals;

/// Health of one controller.
#[derive(Clone, Debug)]
pub(super) struct Health {
    /// Sensor readings.
    pub(super) sensors: SensorReadings,
    /// I/O totals of its queues.
    pub(super) traffic: IoTotals,
    /// Media and data integrity errors reported in completions.
    pub(super) media_errors: u64,
    /// Time of power-on, when the controller was opened.
    powered_at: Instant,
    /// Time for which the composite temperature has been at or above the warning threshold.
    pub(super) warning: AccumulatedTime,
    /// The same for the critical threshold.
    pub(super) critical: AccumulatedTime,
    /// Warnings at the last check.
    warned: u8,
}

/// Sensor readings of a controller; a simulation may set any values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SensorReadings {
    /// Composite temperature.
    pub temperature_kelvin: u16,
    /// Remaining spare capacity, 0 to 100.
    pub spare_percent: u8,
    /// Percentage used, 0 to 255; may exceed 100.
    pub used_percent: u8,
    /// Reliability is degraded.
    pub is_unreliable: bool,
    /// All media have become read-only.
    pub is_read_only: bool,
}

/// Accumulated time during which a condition held.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AccumulatedTime {
    total: Span,
    since: Option<Instant>,
}

/// Warning composite temperature threshold (WCTEMP).
pub(super) const WARNING_KELVIN: u16 = 343;
/// Critical composite temperature threshold (CCTEMP).
pub(super) const CRITICAL_KELVIN: u16 = 353;
/// Spare capacity below which a warning is raised.
pub(super) const SPARE_THRESHOLD_PERCENT: u8 = 10;

/// Critical Warning: spare capacity is low (byte in Base 2.1 §5.1.12.1.3, Figure 206).
pub(super) const WARNING_SPARE: u8 = 1 << 0;
/// A temperature is outside its thresholds.
pub(super) const WARNING_TEMPERATURE: u8 = 1 << 1;
/// Reliability is degraded.
pub(super) const WARNING_RELIABILITY: u8 = 1 << 2;
/// All media are read-only.
pub(super) const WARNING_READ_ONLY: u8 = 1 << 3;

/// Temperature thresholds of the host (Base 2.1 §5.1.25.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TemperatureThresholds {
    /// Warning at or above.
    pub(super) over_kelvin: u16,
    /// Warning at or below.
    pub(super) under_kelvin: u16,
}

impl Health {
    pub(super) const fn new(now: Instant, temperature_kelvin: u16) -> Self {
        Self {
            sensors: SensorReadings {
                temperature_kelvin,
                spare_percent: 100,
                used_percent: 0,
                is_unreliable: false,
                is_read_only: false,
            },
            traffic: IoTotals {
                read_bytes: 0,
                written_bytes: 0,
                read_commands: 0,
                write_commands: 0,
                busy: Span { ns: 0 },
            },
            media_errors: 0,
            powered_at: now,
            warning: AccumulatedTime { total: Span { ns: 0 }, since: None },
            critical: AccumulatedTime { total: Span { ns: 0 }, since: None },
            warned: 0,
        }
    }

    /// Sets the sensor readings.
    pub(super) fn set_sensor_readings(&mut self, now: Instant, sensors: SensorReadings) {
        self.sensors = sensors;
        self.warning.set_condition(now, sensors.temperature_kelvin >= WARNING_KELVIN);
        self.critical.set_condition(now, sensors.temperature_kelvin >= CRITICAL_KELVIN);
    }

    /// Critical Warning byte.
    pub(super) fn warnings(&self, thresholds: TemperatureThresholds) -> u8 {
        let kelvin = self.sensors.temperature_kelvin;
        let outside = kelvin >= thresholds.over_kelvin || kelvin <= thresholds.under_kelvin;
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        bit(self.sensors.spare_percent < SPARE_THRESHOLD_PERCENT, WARNING_SPARE)
            | bit(outside, WARNING_TEMPERATURE)
            | bit(self.sensors.is_unreliable, WARNING_RELIABILITY)
            | bit(self.sensors.is_read_only, WARNING_READ_ONLY)
    }

    /// Warnings that are new since the last call.
    pub(super) fn take_new_warnings(&mut self, thresholds: TemperatureThresholds) -> u8 {
        let warnings = self.warnings(thresholds);
        warnings & !core::mem::replace(&mut self.warned, warnings)
    }

    /// Whole hours since power-on.
    pub(super) fn power_on_hours(&self, now: Instant) -> u64 {
        now.since(self.powered_at).ns / Span::from_secs(3600).ns
    }
}

impl AccumulatedTime {
    /// Sets whether the condition holds from now on.
    fn set_condition(&mut self, now: Instant, holds: bool) {
        if let Some(since) = self.since.take() {
            self.total.ns = self.total.ns.saturating_add(now.since(since).ns);
        }
        self.since = holds.then_some(now);
    }

    /// Whole minutes so far.
    pub(super) fn minutes(&self, now: Instant) -> u32 {
        let running = self.since.map_or(0, |since| now.since(since).ns);
        let minutes = self.total.ns.saturating_add(running) / Span::from_secs(60).ns;
        u32::try_from(minutes).unwrap_or(u32::MAX)
    }
}

/// Converts bytes to data units: thousands of 512 bytes, rounded up (Base 2.1 §5.1.12.1.3).
pub(super) const fn bytes_to_data_units(bytes: u64) -> u64 {
    bytes.div_ceil(512_000)
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{Health, TemperatureThresholds, bytes_to_data_units};
    use crate::controller::transport_interface::IoTotals;

    const AT_0: Instant = Instant { ns: 0 };
    const THRESHOLDS: TemperatureThresholds =
        TemperatureThresholds { over_kelvin: 343, under_kelvin: 0 };

    #[test]
    fn critical_warning_bits_are_reported_as_new_once() {
        let mut health = Health::new(AT_0, 310);
        assert_eq!(health.take_new_warnings(THRESHOLDS), 0);
        let well = health.sensors;
        for (bit, sensors) in [
            (0x01, super::SensorReadings { spare_percent: 9, ..well }),
            (0x02, super::SensorReadings { temperature_kelvin: 343, ..well }),
            (0x04, super::SensorReadings { is_unreliable: true, ..well }),
            (0x08, super::SensorReadings { is_read_only: true, ..well }),
        ] {
            health.set_sensor_readings(AT_0, sensors);
            assert_eq!(health.take_new_warnings(THRESHOLDS), bit);
            assert_eq!(health.take_new_warnings(THRESHOLDS), 0, "said once");
            health.set_sensor_readings(AT_0, well);
            assert_eq!(health.take_new_warnings(THRESHOLDS), 0);
        }
    }

    #[test]
    fn over_and_under_temperature_thresholds_warn() {
        let health = Health::new(AT_0, 310);
        for (over_kelvin, under_kelvin, warned) in
            [(311, 309, 0), (310, 309, 2), (311, 310, 2), (310, 310, 2)]
        {
            assert_eq!(
                health.warnings(TemperatureThresholds { over_kelvin, under_kelvin }),
                warned
            );
        }
    }

    #[test]
    fn temperature_time_accumulates_only_above_the_threshold() {
        let mut health = Health::new(AT_0, 310);
        let minute = |count: u64| AT_0.after(Span::from_secs(60 * count));
        let hot = super::SensorReadings { temperature_kelvin: 343, ..health.sensors };
        let well = health.sensors;
        health.set_sensor_readings(minute(1), hot);
        assert_eq!(health.warning.minutes(minute(3)), 2);
        health.set_sensor_readings(minute(4), well);
        assert_eq!(health.warning.minutes(minute(90)), 3);
        assert_eq!(health.critical.minutes(minute(90)), 0);
        assert_eq!((health.power_on_hours(minute(59)), health.power_on_hours(minute(60))), (0, 1));
    }

    #[test]
    fn io_counters_accumulate_and_data_units_round_up() {
        let mut health = Health::new(AT_0, 310);
        let one = IoTotals {
            read_bytes: 512_000,
            written_bytes: 1,
            read_commands: 2,
            write_commands: 3,
            busy: Span::from_ms(4),
        };
        health.traffic.add(&one);
        health.traffic.add(&one);
        assert_eq!(bytes_to_data_units(health.traffic.read_bytes), 2);
        assert_eq!(bytes_to_data_units(health.traffic.written_bytes), 1);
        assert_eq!((health.traffic.read_commands, health.traffic.write_commands), (4, 6));
        assert_eq!(health.traffic.busy, Span::from_ms(8));
        assert_eq!(bytes_to_data_units(0), 0);
        assert_eq!(bytes_to_data_units(512_001), 2);
    }
}
