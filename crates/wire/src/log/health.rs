//! Health of the medium: SMART (02h), endurance groups (09h), rotation (16h).

use crate::layout::layout;

layout! {
    /// 02h: SMART / Health Information (Base 2.1 §5.1.12.1.3).
    pub struct HealthInformation[512] {
        /// Critical Warning.
        critical_warning @ 0: CriticalWarning;
        /// Composite Temperature, in kelvins.
        composite_temperature @ 1: u16;
        /// Available Spare, in percent.
        available_spare @ 3: u8;
        /// Available Spare Threshold, in percent.
        available_spare_threshold @ 4: u8;
        /// Percentage Used.
        percentage_used @ 5: u8;
        /// Endurance Group Critical Warning Summary.
        endurance_group_warnings @ 6: EnduranceGroupWarning;
        /// Data Units Read, in thousands of 512 bytes.
        data_units_read @ 32: u128;
        /// Data Units Written, in thousands of 512 bytes.
        data_units_written @ 48: u128;
        /// Host Read Commands.
        host_read_commands @ 64: u128;
        /// Host Write Commands.
        host_write_commands @ 80: u128;
        /// Controller Busy Time, in minutes.
        controller_busy_minutes @ 96: u128;
        /// Power Cycles.
        power_cycles @ 112: u128;
        /// Power On Hours.
        power_on_hours @ 128: u128;
        /// Unexpected Power Losses.
        unexpected_power_losses @ 144: u128;
        /// Media and Data Integrity Errors.
        media_errors @ 160: u128;
        /// Number of Error Information Log Entries.
        error_log_entries @ 176: u128;
        /// Warning Composite Temperature Time, in minutes.
        warning_temperature_minutes @ 192: u32;
        /// Critical Composite Temperature Time, in minutes.
        critical_temperature_minutes @ 196: u32;
        /// Temperature Sensors 1 to 8, in kelvins; 0 for one that is not implemented.
        temperature_sensor @ 200: u16[8];
        /// Thermal Management Temperature 1 Transition Count.
        thermal_1_transitions @ 216: u32;
        /// Thermal Management Temperature 2 Transition Count.
        thermal_2_transitions @ 220: u32;
        /// Total Time For Thermal Management Temperature 1, in seconds.
        thermal_1_seconds @ 224: u32;
        /// Total Time For Thermal Management Temperature 2, in seconds.
        thermal_2_seconds @ 228: u32;
    }

    /// Critical Warning (Base 2.1 §5.1.12.1.3).
    pub struct CriticalWarning(u8) {
        /// Available Spare Capacity Below Threshold.
        spare_below_threshold @ 0: bool;
        /// Temperature Threshold Condition.
        temperature_threshold @ 1: bool;
        /// NVM Subsystem Degraded Reliability.
        degraded_reliability @ 2: bool;
        /// All Media Read-Only.
        media_read_only @ 3: bool;
        /// Volatile Memory Backup Failed.
        volatile_backup_failed @ 4: bool;
        /// Persistent Memory Region Read-Only.
        persistent_memory_read_only @ 5: bool;
    }

    /// Critical warnings of endurance groups (Base 2.1 §5.1.12.1.3, §5.1.12.1.10).
    pub struct EnduranceGroupWarning(u8) {
        /// Available Spare Capacity Below Threshold.
        spare_below_threshold @ 0: bool;
        /// Degraded Reliability.
        degraded_reliability @ 2: bool;
        /// Read-Only.
        read_only @ 3: bool;
    }

    /// 09h: Endurance Group Information (Base 2.1 §5.1.12.1.10).
    pub struct EnduranceGroupInformation[512] {
        /// Critical Warning.
        critical_warning @ 0: EnduranceGroupWarning;
        /// Endurance Group Features.
        features @ 1: u8 {
            /// Rotational Media.
            rotational @ 0: bool;
        };
        /// Available Spare, in percent.
        available_spare @ 3: u8;
        /// Available Spare Threshold, in percent.
        available_spare_threshold @ 4: u8;
        /// Percentage Used.
        percentage_used @ 5: u8;
        /// Domain Identifier.
        domainid @ 6: u16;
        /// Endurance Estimate, in billions of bytes.
        endurance_estimate @ 32: u128;
        /// Data Units Read, in billions of bytes.
        data_units_read @ 48: u128;
        /// Data Units Written, in billions of bytes.
        data_units_written @ 64: u128;
        /// Media Units Written, in billions of bytes.
        media_units_written @ 80: u128;
        /// Host Read Commands.
        host_read_commands @ 96: u128;
        /// Host Write Commands.
        host_write_commands @ 112: u128;
        /// Media and Data Integrity Errors.
        media_errors @ 128: u128;
        /// Number of Error Information Log Entries.
        error_log_entries @ 144: u128;
        /// Total Endurance Group Capacity, in bytes.
        tegcap @ 160: u128;
        /// Unallocated Endurance Group Capacity, in bytes.
        uegcap @ 176: u128;
    }

    /// 16h: Rotational Media Information (Base 2.1 §5.1.12.1.22).
    pub struct RotationalMedia[512] {
        /// Endurance Group Identifier.
        endgid @ 0: u16;
        /// Number of Actuators.
        actuators @ 2: u16;
        /// Nominal Rotational Speed, in revolutions per minute.
        nominal_speed @ 4: u16;
        /// Spinup Count.
        spinups @ 8: u32;
        /// Failed Spinup Count.
        failed_spinups @ 12: u32;
        /// Load Count.
        loads @ 16: u32;
        /// Failed Load Count.
        failed_loads @ 20: u32;
    }
}

impl HealthInformation {
    /// The composite temperature, in degrees Celsius.
    #[must_use]
    pub fn temperature_celsius(&self) -> i32 {
        i32::from(self.composite_temperature()) - 273
    }
}

#[cfg(test)]
mod tests {
    use super::HealthInformation;

    #[test]
    fn health_log_fields_match_other_implementations() {
        let mut bytes = [0; 512];
        bytes[0] = 0x02;
        bytes[1..3].copy_from_slice(&310_u16.to_le_bytes());
        bytes[5] = 3;
        bytes[32] = 1;
        bytes[191] = 0x80;
        bytes[202] = 0x2c;
        bytes[203] = 0x01;
        let health = HealthInformation::from_bytes(&bytes);
        assert!(health.critical_warning().temperature_threshold());
        assert_eq!((health.temperature_celsius(), health.percentage_used()), (37, 3));
        assert_eq!((health.data_units_read(), health.error_log_entries()), (1, 1 << 127));
        assert_eq!(health.temperature_sensor(1), Some(300));
    }
}
