//! What those tell whose guests come and go.

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A guest has come: who it is.
    Came(String),
    /// It has left, or was sent away for this reason.
    Left(Option<String>),
    /// Something that somebody may want to look at.
    Trouble(String),
}

impl News {
    /// The same, saying where the guest is served: there are others.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let named = |text| format!("{place}: {text}");
        match self {
            Self::Came(who) => Self::Came(named(who)),
            Self::Left(why) => Self::Left(why.map(named)),
            Self::Trouble(text) => Self::Trouble(named(text)),
        }
    }
}
