//! SMART / Health Information and Firmware Slot Information log pages (Base 2.1 §5.1.12.1.3,
//! §5.1.12.1.4).

use tenmil_base::{Instant, Span};
use tenmil_wire::layout::Ascii;
use tenmil_wire::log::firmware::FirmwareSlots;
use tenmil_wire::log::health::{CriticalWarning, HealthInformation};

use crate::controller::Controller;
use crate::controller::firmware::SLOTS;
use crate::controller::health::{SPARE_THRESHOLD_PERCENT, bytes_to_data_units};

impl Controller {
    pub(super) fn health_log_page(&self, now: Instant) -> Vec<u8> {
        let health = &self.health;
        let (sensors, traffic) = (&health.sensors, &health.traffic);
        let (power_cycles, losses) = {
            let state = self.subsystem.lock_state();
            (state.power_cycles, state.unsafe_shutdowns)
        };
        let page = HealthInformation::zeroed().with(|page| {
            page.critical_warning(CriticalWarning(
                health.warnings(self.values.temperature_thresholds()),
            ))
            .composite_temperature(sensors.temperature_kelvin)
            .available_spare(sensors.spare_percent)
            .available_spare_threshold(SPARE_THRESHOLD_PERCENT)
            .percentage_used(sensors.used_percent)
            .data_units_read(bytes_to_data_units(traffic.read_bytes).into())
            .data_units_written(bytes_to_data_units(traffic.written_bytes).into())
            .host_read_commands(traffic.read_commands.into())
            .host_write_commands(traffic.write_commands.into())
            .controller_busy_minutes((traffic.busy.ns / Span::from_secs(60).ns).into())
            .power_cycles(power_cycles.into())
            .power_on_hours(health.power_on_hours(now).into())
            .unexpected_power_losses(losses.into())
            .media_errors(health.media_errors.into())
            .error_log_entries(self.errors.total_count().into())
            .warning_temperature_minutes(health.warning.minutes(now))
            .critical_temperature_minutes(health.critical.minutes(now))
        });
        page.as_bytes().to_vec()
    }

    pub(super) fn firmware_slot_log_page(&self) -> Vec<u8> {
        let state = self.subsystem.lock_state();
        let (running, next) = state.firmware.active_and_next_slot();
        let mut page = FirmwareSlots::zeroed().with(|page| page.cafslt(running).nrafslt(next));
        for slot in 1..=SLOTS {
            if let Some(revision) = state.firmware.slot_revision(slot) {
                page.set().frs(usize::from(slot) - 1, Ascii(revision));
            }
        }
        page.as_bytes().to_vec()
    }
}
